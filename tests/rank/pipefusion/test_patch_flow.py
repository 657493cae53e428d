"""PipeFusion of ComfyUI's modules in ComfyUI's loop, compared with stock's latent and with patches in one process."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file

from comfy_modules import import_comfyui_here
from comfy_weight_files import spec as comfy_spec
from comfy_weight_files import write
from differences import relative_difference as far
from loop_jobs import loop_job
from loop_ranks import LoopRanks, ParentOfRankZero
from nccl_semantics import NCCL_SEMANTICS
from parallel_backend.engine.comm.groups import Layouts
from parallel_backend.engine.load import load_under
from parallel_backend.errors import Cancelled
from parallel_backend.models.comfyui.formats.stored_weights import by_stages
from parallel_backend.models.comfyui.model_file import inspect
from parallel_backend.models.comfyui.tiny.cases import build_tiny
from parallel_backend.models.comfyui.tiny.weights import fill, random
from parallel_backend.models.dtypes import Dtypes
from parallel_backend.rank.work.device import weight_bytes
from parallel_backend.requests import LoopState
from parallel_backend.sampling.samplers import STEPS
from parallel_backend.strategy import ParallelStrategy
from ranks import run_ranks
from shipped_jobs import stock_latent
from wan_jobs import SHAPES, patchwise_latent, sound_job, sound_model, tiny_wan, two_prompts, wan_job
from wan_jobs import STEPS as STEPS_OF_A_JOB

EXACT = 1e-5  # of the largest value
PIPE = ParallelStrategy(pipefusion_degree=2)
FLOW = {"warmup_steps": 1, "num_pipeline_patch": 4}
PATCHES = (12, 11, 11, 11)  # tokens of each of the four patches
KINDS = 2  # blocks of each of Flux' two kinds


class Ranks(LoopRanks):
    def run(self, strategy, job, cancel_at=0, state=None):
        latent, run, parent = super().run(strategy, job, state=state, parent=ParentOfRankZero(cancel_at))
        return {
            "latent": latent,
            "exact": run.exact,
            "notes": " ".join(run.notes),
            "steps": parent.steps,
            "answers": [state.answers for state in parent.states],
        }


def sampled(world, spec, cases):
    ranks = Ranks(world, spec)
    return {name: ranks.run(*case) for name, case in cases.items()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("wan")


@pytest.fixture(scope="module")
def spec(folder):
    return tiny_wan(folder)


def two_kinds(folder):
    return comfy_spec(write(folder / "flux.safetensors", "fp32", blocks=KINDS))


def test_warm_up_steps_and_one_patch_alone_give_stocks_latent(spec):
    """One patch uses no stale keys, so samplers, guidance and masks of flowing patches can be compared with stock."""
    kept = torch.ones_like(wan_job().noise)
    kept[..., :2] = 0.25
    masked = {"denoise_mask": kept, "latent": torch.full_like(kept, 0.3)}
    one = PIPE.replace(warmup_steps=2, num_pipeline_patch=1)
    cases = {sampler: (one, wan_job(sampler, batch=2)) for sampler in STEPS}
    cases["masked"] = one, wan_job("heun", **masked)
    cases["cfg 1"] = one, wan_job("euler", cfg=1.0)
    cases["warm-up alone"] = PIPE.replace(warmup_steps=STEPS_OF_A_JOB), wan_job()
    cases["another sampler"] = PIPE, wan_job("uni_pc")
    area = wan_job()
    area.conds["positive"][0]["area"] = (2, 4, 4, 0, 2, 2)
    cases["an area"] = PIPE, area
    times = wan_job()
    times.conds["negative"][0]["timestep_start"] = 0.9
    cases["some steps"] = PIPE, times
    first, other = run_ranks(sampled, 2, spec, cases)
    for name, (_, job) in cases.items():
        found = first[name]
        assert far(found["latent"], stock_latent(spec, job)) <= EXACT, name
        assert found["exact"] and other[name]["exact"], name
        assert found["steps"] == list(range(1, STEPS_OF_A_JOB + 1)), name
    for name, words in {
        "warm-up alone": "all of the 4 steps are warm-up steps",
        "another sampler": "patches cannot take the steps of unipc apart",
        "an area": "prompts for areas",
        "some steps": "prompts for some of the steps",
    }.items():
        assert words in first[name]["notes"]
    assert not first["euler"]["notes"]


def test_flowing_patches_are_those_of_one_process_whatever_the_stages(spec):
    job = wan_job()
    stock, expected = stock_latent(spec, job), patchwise_latent(spec, job, 1, PATCHES)
    # Stale keys must change the latent a little, else this test could not see wrong patches.
    assert 1e-3 < far(expected, stock) < 0.1
    found = {"2": run_ranks(sampled, 2, spec, {"": (PIPE.replace(**FLOW), job)})}
    cases = {name: (PIPE.replace(**FLOW, **{name: 2}), job) for name in ("cfg_degree", "ring_degree")}
    found["4"] = run_ranks(sampled, 4, spec, cases, backend=NCCL_SEMANTICS)
    for stages, (first, *others) in found.items():
        for name, one in first.items():
            assert far(one["latent"], expected) <= EXACT, (stages, name)
            assert one["steps"] == list(range(1, STEPS_OF_A_JOB + 1)), (stages, name)
            assert not one["exact"] and not any(other[name]["exact"] for other in others), (stages, name)


# Ways to mix latents and noise other than flow matching: (ComfyUI's class of the schedule, class of the prediction).
SAMPLINGS = {
    "EPS": ("ModelSamplingDiscrete", "EPS"),
    "v": ("ModelSamplingDiscrete", "V_PREDICTION"),
    "v of raw input": ("ModelSamplingDiscrete", "V_PREDICTION_DDPM"),
    "EDM": ("ModelSamplingContinuousEDM", "EDM"),
    "Cosmos": ("ModelSamplingCosmosRFlow", "COSMOS_RFLOW"),
}
LEVELS = torch.tensor([9.0, 4.0, 1.5, 0.5, 0.0])  # for all of them


def other_sampling(name, sampler="euler", **changes):
    return wan_job(sampler, sampling=(*SAMPLINGS[name], {}), sigmas=LEVELS, **changes)


def test_one_patch_is_stocks_latent_however_latents_and_noise_mix(spec):
    one = PIPE.replace(num_pipeline_patch=1)
    kept = torch.ones_like(wan_job().noise)
    kept[..., :2] = 0.25
    # The others have the same steps as for flow matching (samplers.USUAL_STEPS).
    jobs = {name: other_sampling(name, "euler_ancestral") for name in SAMPLINGS}
    jobs["heun"] = other_sampling("EPS", "heun")
    jobs["masked"] = other_sampling("Cosmos", denoise_mask=kept, latent=torch.full_like(kept, 0.3))
    # The node ModelNoiseScale sets this.
    loud = ("ModelSamplingDiscreteFlow", "CONST", {"noise_scale": 2.0})
    jobs["louder"] = wan_job("euler_ancestral", sampling=loud)
    found = run_ranks(sampled, 2, spec, {name: (one, job) for name, job in jobs.items()})[0]
    for name, job in jobs.items():
        assert far(found[name]["latent"], stock_latent(spec, job)) <= EXACT, name
        assert found[name]["exact"] and not found[name]["notes"], name
    assert far(found["louder"]["latent"], stock_latent(spec, wan_job("euler_ancestral"))) > 0.1


def test_patches_of_a_noise_predicting_model_are_those_of_one_process(spec):
    job = other_sampling("EPS")
    stock = stock_latent(spec, job)
    expected = patchwise_latent(spec, job, 1, PATCHES, flow=False)
    assert 1e-3 < far(expected, stock) < 0.1
    unknown = wan_job(sampling=("ModelSamplingDiscrete", "X0", {}), sigmas=LEVELS)
    cases = {"": (PIPE.replace(**FLOW), job), "unknown": (PIPE.replace(**FLOW), unknown)}
    found = run_ranks(sampled, 2, spec, cases)[0]
    assert far(found[""]["latent"], expected) <= EXACT and not found[""]["exact"]
    assert found["unknown"]["exact"] and "do not know this model's sampling" in found["unknown"]["notes"]


def test_a_model_of_two_kinds_of_blocks_flows_alike_through_any_stages(folder):
    """Flux.1 also has text tokens. A stage may start within the first kind of blocks, within the second, or between
    them. One patch gives stock's latent."""
    spec, job = two_kinds(folder), loop_job()
    stock = stock_latent(spec, job)
    flows = {shares: PIPE.replace(**FLOW, device_shares=shares) for shares in ((), (1.0, 3.0), (3.0, 1.0))}
    cases = {str(shares): (strategy, job) for shares, strategy in flows.items()}
    cases["one patch"] = PIPE.replace(num_pipeline_patch=1), job
    unlike = loop_job()  # only one prompt has a reference image
    unlike.conds["positive"][0]["model_conds"]["ref_latents"] = "CONDList", [random(1, 16, 4, 6)]
    cases["unlike"] = PIPE.replace(**FLOW), unlike
    found = run_ranks(sampled, 2, spec, cases)[0]
    tokens = PIPE.replace(ulysses_degree=2, **FLOW, device_shares=(1.0, 2.0, 3.0, 3.0))
    shared = run_ranks(sampled, 4, spec, {"": (tokens, job)})[0][""]
    expected = found["()"]["latent"]
    assert far(shared["latent"], expected) <= EXACT and not shared["notes"]
    assert far(found["one patch"]["latent"], stock) <= EXACT and found["one patch"]["exact"]
    assert found["unlike"]["exact"] and "the prompts have unlike tokens" in found["unlike"]["notes"]
    assert 1e-4 < far(expected, stock) < 0.1
    for shares in map(str, flows):
        assert far(found[shares]["latent"], expected) <= EXACT and not found[shares]["exact"]
        assert not found[shares]["notes"]


def cogvideo(folder):
    """Returns (ModelSpec, job) of a file with its own sampling: v-prediction, whose first noise level is pure noise."""
    import_comfyui_here()
    path = folder / "cogvideo.safetensors"
    weights = fill(build_tiny("cogvideo", num_attention_heads=2, attention_head_dim=64)).state_dict()
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, path)
    return comfy_spec(path), wan_job("dpmpp_2m", sigmas=LEVELS, conds=two_prompts(48, {}))


@pytest.mark.parametrize("name", ["cogvideo", *SHAPES])
def test_other_kinds_of_models_flow_alike_through_any_stages(folder, name):
    """One patch gives stock's latent, several come close to it. Latents of video and sound are one flat tensor. MiniMax
    H3 puts prompts of different lengths before them in one sequence."""
    if name == "cogvideo":
        (spec, job), parts = cogvideo(folder), (slice(None),)
    else:
        video = SHAPES[name][0].numel()
        parts = slice(video), slice(video, None)
        spec, job = sound_model(folder, name), sound_job(name, "euler_ancestral")
    stock = stock_latent(spec, job)
    cases = {"flow": (PIPE.replace(**FLOW), job), "one patch": (PIPE.replace(num_pipeline_patch=1), job)}
    cases["uneven"] = PIPE.replace(**FLOW, device_shares=(1.0, 3.0)), job
    found = run_ranks(sampled, 2, spec, cases)[0]
    assert far(found["one patch"]["latent"], stock) <= EXACT and found["one patch"]["exact"]
    assert far(found["flow"]["latent"], found["uneven"]["latent"]) <= EXACT and not found["flow"]["exact"]
    assert not found["uneven"]["notes"]
    for part in parts:
        assert 1e-4 < far(found["uneven"]["latent"][..., part], stock[..., part]) < 0.1


def cancelled(world, spec):
    """Returns (the error of a cancel while patches flow, True if the next job equals the one before the cancel)."""
    ranks = Ranks(world, spec)
    strategy, job, words = PIPE.replace(**FLOW), wan_job(), ""
    whole = ranks.run(strategy, job)["latent"]
    try:
        ranks.run(strategy, job, cancel_at=7)
    except Cancelled as error:
        words = str(error)
    return words, torch.equal(ranks.run(strategy, job)["latent"], whole)


def test_a_cancel_while_patches_flow_ends_the_job_on_all_ranks_which_stay_usable(spec):
    first, other = run_ranks(cancelled, 2, spec)
    assert first == other == ("The request was cancelled.", True)


def resumed(world, spec):
    """Runs a job with two warm-up steps, the same job resumed after them, and a job with three warm-up steps."""
    ranks, job = Ranks(world, spec), wan_job()
    two, three = (PIPE.replace(warmup_steps=warm) for warm in (2, 3))
    first = ranks.run(two, job)
    record = torch.cat(first["answers"]) if world.rank == 0 else torch.empty(4, 1, *job.noise.shape)
    torch.distributed.broadcast(record, 0)
    rest = ranks.run(two, job, state=LoopState(2, 0, record))
    return {"first": first, "rest": rest, "three": ranks.run(three, job)}


def test_a_job_that_goes_on_after_a_crash_has_one_more_step_of_whole_images_for_their_keys(spec):
    found = run_ranks(resumed, 2, spec)[0]
    assert len(found["first"]["answers"]) == 2, "patches leave no states"
    assert found["rest"]["steps"] == [3, 4] and not found["rest"]["exact"]
    assert far(found["rest"]["latent"], found["three"]["latent"]) <= EXACT
    assert far(found["rest"]["latent"], found["first"]["latent"]) > EXACT


def test_stages_of_two_kinds_of_blocks_hold_unequal_bytes_which_the_prediction_counts(folder):
    spec = two_kinds(folder)
    header = inspect(spec.path)
    lists = {"double_blocks": KINDS, "single_blocks": KINDS}
    weights = replace(header.weights, blocks=by_stages(header.weights.blocks, lists))
    file = replace(header, weights=weights)
    dtypes = Dtypes.of("auto", file.dtype, on_cpu=True)
    for stages in (2, 3):
        strategy, found = PIPE.replace(pipefusion_degree=stages), run_ranks(held_bytes, stages, spec)
        told = [file.held_weights(dtypes, strategy, rank, on_cpu=True) for rank in range(stages)]
        assert [sum(one.values()) for one in found] == [one.private + one.mapped for one in told]
        assert found[0]["blocks"] > found[-1]["blocks"]


def held_bytes(world, spec):
    model = load_under(spec, Layouts(world), ParallelStrategy(pipefusion_degree=world.world_size))
    found = {"blocks": 0, "around": 0}
    for name, parameter in model.module.named_parameters():
        found["blocks" if "blocks." in name else "around"] += parameter.nbytes
    assert sum(found.values()) == weight_bytes(model.chunks, world.device)
    return found
