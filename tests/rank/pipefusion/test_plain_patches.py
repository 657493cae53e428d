"""PipeFusion in plain jobs, alone and with other axes, equals the paper's algorithm in one process."""

from __future__ import annotations

import functools

import pytest
import torch

from differences import relative_difference
from flux_requests import CASES as ALL_CASES
from flux_requests import TOLERANCE
from nccl_semantics import NCCL_STREAMS
from oracle import oracle_model, oracle_sample, patchwise_sample
from parallel_backend.engine.comm.groups import Layouts
from parallel_backend.engine.load import load_under
from parallel_backend.errors import Cancelled
from parallel_backend.layout import split_sizes
from parallel_backend.requests import ModelSpec
from parallel_backend.strategy import ParallelStrategy
from plain_jobs import Boundary, PlainJobs
from ranks import run_ranks
from tests.closed_forms.pipeline_traffic import PipelineTraffic
from tiny_flux import write_tiny_flux

HEADS, DOUBLE, SINGLE = 2, 2, 4
CASES = {
    name: ALL_CASES[name]
    for name in (
        "dividing, cfg 1, batch 1",
        "odd sides, cfg 4, batch 3",
        "text lengths differ",
        "fewer text tokens than ranks",
        "fewer image tokens than ranks",
    )
}
WITHOUT_CFG = ("dividing, cfg 1, batch 1", "fewer text tokens than ranks", "fewer image tokens than ranks")


def pipe(stages, **more):
    return ParallelStrategy(pipefusion_degree=stages, **{"warmup_steps": 1, **more})


def name_of(strategy):
    return f"{strategy.describe()}, {strategy.pipeline_patches} patches, warm-up {strategy.warmup_steps}"


# Patches flow after 1 or 2 of 3 steps.
FLOWING = {
    2: [pipe(2), pipe(2, warmup_steps=2, num_pipeline_patch=7), pipe(2, device_shares=(1, 3))],
    3: [pipe(3, num_pipeline_patch=2)],
    4: [pipe(4), pipe(2, cfg_degree=2)],
    8: [pipe(2, ring_degree=2, ulysses_degree=2)],
}
ALL = [strategy for of_size in FLOWING.values() for strategy in of_size]


@pytest.fixture(scope="module")
def subject(tmp_path_factory):
    """Returns (path of the weights, the oracle's model)."""
    folder, sizes = tmp_path_factory.mktemp("pipeline"), dict(double_blocks=DOUBLE, single_blocks=SINGLE)
    path = write_tiny_flux(folder / "tiny.safetensors", heads=HEADS, **sizes)
    return str(path), oracle_model(folder, heads=HEADS, **sizes)


def sample(world, path, strategies):
    """Returns for each strategy {case: (latent, bytes that this rank sent)}."""
    jobs = PlainJobs(Layouts(world))
    return [
        {name: jobs.run(path, strategy, case)[::2] for name, case in CASES.items()} for strategy in strategies
    ]


@pytest.fixture(scope="module")
def results_of(subject):
    """Returns a function that gives each rank's {case: (latent, bytes)} under one of FLOWING."""

    @functools.cache
    def run(ranks):
        return run_ranks(sample, ranks, subject[0], FLOWING[ranks], backend=NCCL_STREAMS)

    def get(strategy):
        number = FLOWING[strategy.world_size].index(strategy)
        return [of_rank[number] for of_rank in run(strategy.world_size)]

    return get


@pytest.fixture(scope="module")
def paper(subject):
    """Returns a function that runs the paper's algorithm in one process, once per case, patches and warm-up steps."""

    @functools.cache
    def latent(case, warmup_steps, patches):
        found = patchwise_sample(subject[1], CASES[case], warmup_steps, patches)
        whole = oracle_sample(subject[1], CASES[case])
        assert relative_difference(whole, found) > 1e-3 or len(patches) == 1, "patches must make a difference"
        return found

    return latent


@pytest.mark.parametrize("strategy", ALL, ids=name_of)
@pytest.mark.xdist_group("pipeline_parity")
def test_flowing_patches_equal_the_papers_algorithm_in_one_process(results_of, paper, strategy):
    """The paper's algorithm is for one image and one prompt. In the other cases, the same patches on two ranks without
    another axis give the same latent."""
    first, *others = results_of(strategy)
    flow = strategy.warmup_steps, strategy.pipeline_patches
    alone = [one for one in FLOWING[2] if (one.warmup_steps, one.pipeline_patches) == flow]
    for case, (latent, _) in first.items():
        assert all(torch.equal(latent, other[case][0]) for other in others), case
        if case in WITHOUT_CFG:
            height, width = CASES[case].noise.shape[-2:]
            tokens = height * width // 4
            patches = split_sizes(tokens, min(tokens, strategy.pipeline_patches))
            assert (
                relative_difference(latent, paper(case, strategy.warmup_steps, tuple(patches))) <= TOLERANCE
            )
        elif alone:
            assert relative_difference(latent, results_of(alone[0])[0][case][0]) <= TOLERANCE, case


@pytest.mark.parametrize("strategy", ALL, ids=name_of)
@pytest.mark.xdist_group("pipeline_parity")
def test_bytes_sent_equal_the_closed_form(results_of, strategy):
    for rank, results in enumerate(results_of(strategy)):
        for name in CASES.keys() - {"text lengths differ"}:  # the closed form is for rows of one length
            case = CASES[name]
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
            flowing = len(case.sigmas) - 1 - strategy.warmup_steps
            whole = strategy.warmup_steps * traffic.whole()
            expected = whole + flowing * traffic.flowing() + traffic.around()
            assert results[name][1] == expected, f"rank {rank}, {name}"


def stop_and_go_on(world, path, strategy, questions):
    jobs, case = PlainJobs(Layouts(world)), ALL_CASES["not dividing, cfg 4, batch 1"]
    before = jobs.run(path, strategy, case)[0]
    for stop_at in range(questions):
        with pytest.raises(Cancelled):
            jobs.run(path, strategy, case, boundary=Boundary(stop_at))
    return [before, jobs.run(path, strategy, case)[0]]


@pytest.mark.parametrize("strategy", [pipe(2, cfg_degree=2), pipe(3)], ids=name_of)
def test_a_run_stopped_at_any_patch_leaves_nothing_behind(subject, strategy):
    """Ranks can receive a cancel at each patch; messages that are still on their way must not reach the next job."""
    questions = strategy.pipeline_patches * (3 - strategy.warmup_steps)
    for before, after in run_ranks(
        stop_and_go_on, strategy.world_size, subject[0], strategy, questions, backend=NCCL_STREAMS
    ):
        assert torch.equal(before, after)


def blocks_held(world, path, strategy):
    """Returns the number of elements that this rank holds: [of the blocks' weights, of all other weights]."""
    return counts_of(load_under(ModelSpec(path), Layouts(world), strategy).module)


def counts_of(module):
    counts = [0, 0]
    for name, parameter in module.named_parameters():
        counts["transformer_blocks." not in name] += parameter.numel()
    return counts


def test_each_stage_loads_its_own_blocks_and_no_others(subject):
    in_blocks, around = counts_of(subject[1])
    first, last = run_ranks(blocks_held, 2, subject[0], pipe(2), backend=NCCL_STREAMS)
    assert first[0] + last[0] == in_blocks and 0 < last[0] < first[0]  # the first stage has the double blocks
    assert first[1] == last[1] == around
