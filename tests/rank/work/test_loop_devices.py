"""ComfyUI's own loop in ranks on a stand-in for a GPU: once a job's tensors are there, nothing of ours waits for it."""

from __future__ import annotations

import pytest
import torch

from comfy_modules import import_comfyui_here
from dispatch_counter import DEVICE
from loop_devices import DeviceLoop
from loop_jobs import loop_job, tiny_model
from parallel_backend.rank.work import step_boundary
from parallel_backend.rank.work.loop_worker import _CALL, _END, _FLOW, _STEP, _Job
from parallel_backend.strategy import ParallelStrategy

ULYSSES, CFG = ParallelStrategy(ulysses_degree=2), ParallelStrategy(cfg_degree=2)
FLOW = ParallelStrategy(pipefusion_degree=2, warmup_steps=1, num_pipeline_patch=2)
STEPS = 3
BOTH = 3  # sides of a call
WHOLE_STEPS = [(_CALL, BOTH), (_STEP, 0)] * STEPS
# Before the first step: the job's tensors go to the device.
BEFORE = "models/comfyui/loop.py"
# When patches begin to flow, once in a job: which patch has which elements, and the levels of noise for the host.
FLOW_BEGINS = (
    "engine/stages/stages.py",
    "rank/pipefusion/patch_flow.py",
    "sampling/image_patches.py",
    "sampling/samplers.py",
)
MOST_AS_IT_BEGINS = 12


@pytest.fixture(scope="module")
def loop(tmp_path_factory):
    import_comfyui_here()
    return DeviceLoop(tiny_model(tmp_path_factory.mktemp("loop")))


@pytest.fixture(autouse=True)
def _all_states(monkeypatch):
    monkeypatch.setattr(step_boundary, "STATES_COST", float("inf"))


def in_steps(found):
    return [wait for wait in found.own if not wait.startswith(BEFORE)]


@pytest.mark.parametrize("sampler", ["euler", "heun", "dpmpp_sde", "uni_pc"])
def test_the_first_rank_waits_where_comfyuis_own_loop_does_and_nowhere_else(loop, sampler):
    """A preview and the record of each step's answers, with a mask."""
    job = loop_job(sampler, steps=STEPS, mask=True)
    found, stock = loop.on_rank(0, ULYSSES, job), loop.stock(job)
    assert in_steps(found) == []
    assert found.syncs - len(found.own) == stock.syncs
    assert found.latent.device == stock.latent.device == DEVICE and found.latent.shape == stock.latent.shape
    assert len(found.previews) == STEPS


@pytest.mark.parametrize("strategy", [ULYSSES, CFG], ids=lambda strategy: strategy.describe())
def test_the_others_wait_for_nothing(loop, strategy):
    found = loop.on_rank(1, strategy, loop_job("euler", steps=STEPS), [*WHOLE_STEPS, (_END, 0)])
    assert in_steps(found) == [] and len(found.calls) == STEPS
    assert found.syncs == len(found.own)  # nor does ComfyUI, whose sampler is the first rank's


@pytest.mark.parametrize("rank", range(2))
@pytest.mark.parametrize("sampler", ["dpmpp_2m", "euler_ancestral"])
def test_patches_wait_when_they_begin_to_flow_and_not_in_a_step(loop, sampler, rank):
    heard = [*WHOLE_STEPS[:2], (_FLOW, BOTH), (_END, 0)]
    waits = []
    for steps in (STEPS, STEPS + 2):
        found = loop.on_rank(rank, FLOW, loop_job(sampler, steps=steps), heard)
        waits.append(in_steps(found))
        assert len(found.calls) > steps
    few, many = waits
    assert len(few) == len(many) <= MOST_AS_IT_BEGINS
    assert all(wait.startswith(FLOW_BEGINS) for wait in few)


def test_what_comfyui_leaves_in_host_memory_stays_there(loop):
    """Modules read it on the host, and ComfyUI compares it there to put prompts into one call."""
    job, tags = loop_job("euler", steps=STEPS), torch.arange(9)
    for prompt in (*job.conds["positive"], *job.conds["negative"]):
        conds = prompt["model_conds"]
        conds["minimax_payload"] = ("CONDConstant", {"text_token_tags": tags.clone()})
        conds["ref_latents"] = ("CONDList", [torch.ones(1, 16, 4, 4)])
    found = loop.on_rank(0, ULYSSES, job)
    assert in_steps(found) == [] and len(found.calls) == STEPS
    for call in found.calls:
        assert torch.equal(call["minimax_payload"]["text_token_tags"], tags)
        assert [latent.device for latent in call["ref_latents"]] == [DEVICE]
        assert call["transformer_options"]["sample_sigmas"].device == DEVICE


def test_a_wait_in_a_step_is_seen(loop, monkeypatch):
    monkeypatch.setattr(_Job, "_check", lambda job, loop, x, sigma: bool(x.isfinite().all()))
    assert len(in_steps(loop.on_rank(0, ULYSSES, loop_job("euler", steps=STEPS)))) == STEPS
