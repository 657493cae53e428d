"""PipeFusion in plain jobs, alone and with other axes: exact in warm-up steps, then equal to the paper's algorithm."""

from __future__ import annotations

import functools

import pytest
import torch

from differences import relative_difference
from flux_requests import CASES as ALL_CASES
from flux_requests import CASES_OF_TWO_STEPS, TOLERANCE
from nccl_semantics import NCCL_STREAMS
from oracle import oracle_sample, oracle_subject
from parallel_backend.engine.comm.groups import Layouts
from parallel_backend.engine.load import load_under
from parallel_backend.errors import Cancelled
from parallel_backend.layout import split_sizes
from parallel_backend.requests import ModelSpec
from parallel_backend.strategy import ParallelStrategy
from patchwise_oracle import patchwise_sample
from plain_jobs import PlainJobs
from point_forward import Boundary
from ranks import run_ranks
from tests.closed_forms.pipeline_traffic import PipelineTraffic

HEADS, DOUBLE, SINGLE = 2, 2, 4
CASES = {
    name: ALL_CASES[name]
    for name in (
        "dividing, cfg 1, batch 1",
        "not dividing, cfg 4, batch 1",
        "odd sides, cfg 4, batch 3",
        "text lengths differ",
        "fewer text tokens than ranks",
        "fewer image tokens than ranks",
    )
}
WITHOUT_CFG = ("dividing, cfg 1, batch 1", "fewer text tokens than ranks", "fewer image tokens than ranks")
EXACT_CASES = {name: CASES_OF_TWO_STEPS[name] for name in CASES}


def sample(world, path, strategies, cases):
    jobs = PlainJobs(Layouts(world))
    results = {}
    for strategy in strategies:
        for name in cases:
            latent, _, sent = jobs.run(path, strategy, cases[name])
            key = f"{name_of(strategy)}: {name}"
            results |= {key: latent, f"{key}: bytes": sent}
    return results


def pipe(stages, **more):
    return ParallelStrategy(pipefusion_degree=stages, **{"warmup_steps": 99, **more})


def name_of(strategy):
    return f"{strategy.describe()}, {strategy.pipeline_patches} patches, warm-up {strategy.warmup_steps}"


# Other axes and more stages also compute a whole image in their warm-up step of FLOWING, without CFG.
STRATEGIES = {
    2: [pipe(2), pipe(2, device_shares=(2, 1))],
    4: [pipe(2, cfg_degree=2), pipe(2, data_degree=2)],
}
ALL = [s for group in STRATEGIES.values() for s in group]


@pytest.fixture(scope="module")
def subject(tmp_path_factory):
    """Returns (path of the weights, {case: the oracle's latent after two steps}, the oracle's model)."""
    sizes = dict(heads=HEADS, double_blocks=DOUBLE, single_blocks=SINGLE)
    return oracle_subject(tmp_path_factory.mktemp("pipeline"), EXACT_CASES, **sizes)


def results_of(path, strategies, cases):
    """Returns a function that runs all strategies of a world size once and returns their results."""

    @functools.cache
    def get(world_size):
        return run_ranks(sample, world_size, path, strategies[world_size], cases, backend=NCCL_STREAMS)

    return get


@pytest.fixture(scope="module")
def exact_results(subject):
    return results_of(subject[0], STRATEGIES, EXACT_CASES)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("strategy", ALL, ids=name_of)
@pytest.mark.xdist_group("pipeline_parity")
def test_with_warm_up_for_all_steps_it_equals_one_process(exact_results, subject, strategy, case):
    expected = subject[1][case]
    for rank, results in enumerate(exact_results(strategy.world_size)):
        difference = relative_difference(results[f"{name_of(strategy)}: {case}"], expected)
        assert difference <= TOLERANCE, f"rank {rank}: {difference:.2e}"


# Patches flow after 1 or 2 of 3 steps.
FLOWING = {
    2: [
        pipe(2, warmup_steps=1),
        pipe(2, warmup_steps=1, num_pipeline_patch=5),
        pipe(2, warmup_steps=2, num_pipeline_patch=7),
        pipe(2, warmup_steps=1, device_shares=(1, 3)),
    ],
    3: [pipe(3, warmup_steps=1, num_pipeline_patch=2)],
    4: [
        pipe(4, warmup_steps=1),
        pipe(2, cfg_degree=2, warmup_steps=1),
        pipe(2, data_degree=2, warmup_steps=1),
        pipe(2, ulysses_degree=2, warmup_steps=1),
        pipe(2, ring_degree=2, warmup_steps=1),
    ],
    8: [pipe(2, ring_degree=2, ulysses_degree=2, warmup_steps=1)],
}


@pytest.fixture(scope="module")
def flowing_results(subject):
    return results_of(subject[0], FLOWING, CASES)


@pytest.fixture(scope="module")
def papers(subject):
    """Returns a function that runs the paper's algorithm in one process, once per case, patches and warm-up steps."""

    @functools.cache
    def latent(case, warmup_steps, patches):
        return patchwise_sample(subject[2], CASES[case], warmup_steps, patches)

    return latent


@pytest.fixture(scope="module")
def whole(subject):
    """Returns the latents of jobs that compute whole images in all steps."""
    return {name: oracle_sample(subject[2], CASES[name]) for name in WITHOUT_CFG}


@pytest.mark.parametrize("case", WITHOUT_CFG)
@pytest.mark.parametrize("strategy", [s for group in FLOWING.values() for s in group], ids=name_of)
@pytest.mark.xdist_group("pipeline_parity")
def test_flowing_patches_equal_the_papers_algorithm_in_one_process(
    flowing_results, papers, whole, strategy, case
):
    height, width = CASES[case].noise.shape[-2:]
    tokens = height * width // 4
    patches = split_sizes(tokens, min(tokens, strategy.pipeline_patches))
    expected = papers(case, strategy.warmup_steps, tuple(patches))
    for results in flowing_results(strategy.world_size):
        assert relative_difference(results[f"{name_of(strategy)}: {case}"], expected) <= TOLERANCE
    assert (
        relative_difference(whole[case], expected) > 1e-3 or len(patches) == 1
    )  # patches must make a difference


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("strategy", [s for group in FLOWING.values() for s in group], ids=name_of)
@pytest.mark.xdist_group("pipeline_parity")
def test_flowing_patches_depend_on_their_number_and_on_no_other_axis(flowing_results, strategy, case):
    """The same patches on 2 ranks without another axis give the same latent, also with CFG, batches and odd sides."""
    key = f"{name_of(strategy)}: {case}"
    results = flowing_results(strategy.world_size)
    assert all(torch.equal(results[0][key], other[key]) for other in results[1:])
    wanted = (strategy.warmup_steps, strategy.pipeline_patches)
    same = [s for s in FLOWING[2] if (s.warmup_steps, s.pipeline_patches) == wanted]
    if same:
        other = flowing_results(2)[0][f"{name_of(same[0])}: {case}"]
        assert (results[0][key] - other).abs().max() <= TOLERANCE * other.abs().max()


@pytest.mark.parametrize("strategy", ALL + [s for group in FLOWING.values() for s in group], ids=name_of)
@pytest.mark.xdist_group("pipeline_parity")
def test_bytes_sent_equal_the_closed_form(exact_results, flowing_results, strategy):
    of, cases = (exact_results, EXACT_CASES) if strategy.warmup_steps == 99 else (flowing_results, CASES)
    results = of(strategy.world_size)
    for rank in range(strategy.world_size):
        for name, case in cases.items():
            if name == "text lengths differ":
                continue  # the closed form is for rows of one length
            batch, _, height, width = case.noise.shape
            traffic = PipelineTraffic(
                strategy,
                rank,
                prompts=len(case.prompts),
                batch=batch,
                text=case.positive.context.shape[1],
                image=-(-height // 2) * -(-width // 2),
                hidden=HEADS * 128,
                latent_elements=16 * height * width,
                layers=DOUBLE + SINGLE,
            )
            steps = len(case.sigmas) - 1
            exact = min(strategy.warmup_steps, steps)
            expected = exact * traffic.whole() + (steps - exact) * traffic.flowing()
            expected += traffic.around() if exact < steps else 0
            assert results[rank][f"{name_of(strategy)}: {name}: bytes"] == expected, f"rank {rank}, {name}"


def stop_and_go_on(world, path, strategy, questions):
    jobs, case = PlainJobs(Layouts(world)), CASES["not dividing, cfg 4, batch 1"]
    before = jobs.run(path, strategy, case)[0]
    for stop_at in range(questions):
        with pytest.raises(Cancelled):
            jobs.run(path, strategy, case, boundary=Boundary(stop_at))
    return [before, jobs.run(path, strategy, case)[0]]


@pytest.mark.parametrize(
    "strategy",
    [
        pipe(2, warmup_steps=1, num_pipeline_patch=3),
        pipe(2, cfg_degree=2, warmup_steps=1),
        pipe(3, warmup_steps=1),
    ],
    ids=name_of,
)
def test_a_run_stopped_at_any_patch_leaves_nothing_behind(subject, strategy):
    """Ranks can receive a cancel at each patch; messages that are still on their way must not reach the next job."""
    questions = strategy.pipeline_patches * (3 - strategy.warmup_steps)
    for before, after in run_ranks(
        stop_and_go_on, strategy.world_size, subject[0], strategy, questions, backend=NCCL_STREAMS
    ):
        assert torch.equal(before, after)


def blocks_held(world, path, strategy):
    """Returns the number of elements that this rank holds: [of the blocks' weights, of all other weights]."""
    model = load_under(ModelSpec(path), Layouts(world), strategy)
    blocks, around = 0, 0
    for name, parameter in model.module.named_parameters():
        if "transformer_blocks." in name:
            blocks += parameter.numel()
        else:
            around += parameter.numel()
    return [blocks, around]


def test_each_stage_loads_its_own_blocks_and_no_others(subject):
    whole = {name: parameter.numel() for name, parameter in subject[2].named_parameters()}
    in_blocks = sum(count for name, count in whole.items() if "transformer_blocks." in name)
    first, last = run_ranks(blocks_held, 2, subject[0], pipe(2), backend=NCCL_STREAMS)
    assert first[0] + last[0] == in_blocks and 0 < last[0] < first[0]  # the first stage has the double blocks
    assert first[1] == last[1] == sum(whole.values()) - in_blocks
