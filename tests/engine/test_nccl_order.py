"""Every strategy's communication under NCCL's semantics: no order that only gloo forgives, nothing read too early."""

from __future__ import annotations

import pytest
import torch

from flux_requests import CONTEXT, POOLED, SIZES, TOLERANCE, request
from nccl_semantics import NCCL_SEMANTICS, NCCL_STREAMS, count_connected
from oracle import oracle_subject
from parallel_backend.engine.bands.vae import BandedDecoder
from parallel_backend.engine.comm.groups import Layouts
from parallel_backend.planner.workload.communicators import count_communicators
from parallel_backend.rank.work.step_boundary import StepBoundary
from parallel_backend.strategy import ParallelStrategy
from plain_jobs import PlainJobs
from ranks import run_ranks
from tiny_vae import FLUX, banded, random_latent, random_vae

CPU = torch.device("cpu")
HEADS = 2
CASES = {
    "odd sides, cfg 4": request(SIZES["odd sides"], 4.0, 1, positive_tokens=8, negative_tokens=5, steps=2),
    # Tokens that some ranks have none of: they must join communicators all the same.
    "fewer tokens than ranks": request((2, 2), 1.0, 1, positive_tokens=1, steps=2),
}


def strategy(**degrees):
    return ParallelStrategy(**{f"{axis}_degree": degree for axis, degree in degrees.items()})


def pipe(stages, warmup_steps, patches, **more):
    return ParallelStrategy(
        pipefusion_degree=stages, warmup_steps=warmup_steps, num_pipeline_patch=patches, **more
    )


def name_of(each):
    return f"{each.describe()}, {each.pipeline_patches} patches, warm-up {each.warmup_steps}"


STRATEGIES = {
    2: [
        *(pipe(2, warmup_steps, patches) for warmup_steps in (0, 1) for patches in (6, 2)),
        strategy(ulysses=2),
        strategy(ring=2),
        strategy(cfg=2),
        strategy(data=2),
        strategy(tensor=2),
        ParallelStrategy(ulysses_degree=2, shard_weights=True),
    ],
    3: [pipe(3, 0, 6), pipe(3, 1, 2), pipe(3, 2, 3), strategy(ring=3)],
    4: [
        strategy(ulysses=2, ring=2),
        strategy(cfg=2, ulysses=2),
        strategy(data=2, tensor=2),
        strategy(ring=4),
        ParallelStrategy(cfg_degree=2, ring_degree=2, shard_weights=True),
        pipe(4, 0, 6),
        pipe(2, 0, 6, cfg_degree=2),
        pipe(2, 1, 4, data_degree=2),
    ],
}


class NoLink:
    """A rank's link to a parent who is silent."""

    def receive(self, timeout):
        return None

    def send(self, envelope, descriptors):
        pass


def boundary(world, steps):
    return StepBoundary(
        NoLink(),
        epoch=0,
        request=0,
        rank=world.rank,
        control=world.control,
        device=world.device,
        steps=steps,
        previews=False,
    )


def sample(world, path, strategies):
    results = {}
    for each in strategies:
        jobs = PlainJobs(Layouts(world))  # its own groups, which nobody has used yet
        for name, case in CASES.items():
            results[f"{name_of(each)}: {name}"] = jobs.run(
                path, each, case, boundary=boundary(world, len(case.sigmas) - 1)
            )[0]
    return results


@pytest.fixture(scope="module")
def subject(tmp_path_factory):
    folder = tmp_path_factory.mktemp("nccl")
    sizes = dict(heads=HEADS, double_blocks=1, single_blocks=3, context_dim=CONTEXT, pooled_dim=POOLED)
    return oracle_subject(folder, CASES, **sizes)[:2]


@pytest.mark.parametrize("backend", [NCCL_SEMANTICS, NCCL_STREAMS])
@pytest.mark.parametrize("world_size", STRATEGIES)
def test_strategies_communicate_in_an_order_that_nccl_takes(subject, world_size, backend):
    """Stages send ahead while answers are asked for: their communicators must run beside each other."""
    path, expected = subject
    flows = backend == NCCL_STREAMS
    strategies = [each for each in STRATEGIES[world_size] if (each.pipefusion_degree > 1) == flows]
    for results in run_ranks(sample, world_size, path, strategies, backend=backend):
        for each in strategies:
            for name, latent in expected.items():
                found = results[f"{name_of(each)}: {name}"]
                if each.pipefusion_degree == 1 or each.warmup_steps >= 2:
                    assert (found - latent).abs().max() <= TOLERANCE * latent.abs().max(), name_of(each)
                else:  # patches make another latent; that it is the right one is tested over gloo
                    assert found.isfinite().all(), name_of(each)


def communicators(world, path, each):
    """Those of this rank that stand after a job, the first of its process."""
    PlainJobs(Layouts(world)).run(path, each, CASES["odd sides, cfg 4"], boundary=boundary(world, 2))
    return count_connected()


@pytest.mark.parametrize(
    "each",
    [
        strategy(ring=2, ulysses=2),
        ParallelStrategy(cfg_degree=2, ulysses_degree=2, shard_weights=True),
        pipe(2, 1, 2, cfg_degree=2),
        pipe(3, 1, 2),
    ],
    ids=name_of,
)
def test_the_memory_prediction_counts_the_communicators_that_come_up(subject, each):
    found = run_ranks(communicators, each.world_size, subject[0], each, backend=NCCL_STREAMS)
    assert found == [count_communicators(each, rank) for rank in range(each.world_size)]


def decode(world, cases):
    decoder = BandedDecoder(banded(FLUX), world)
    images = [decoder(latent, shares) for latent, shares in cases]
    return [torch.empty(0) if image is None else image for image in images]


def test_bands_of_a_vae_communicate_in_an_order_that_nccl_takes():
    # Rows for all, then for the first two of three ranks only, then for the last two.
    sizes = {5: (), 2: (), 3: (1.0, 5.0, 5.0)}
    cases = [(random_latent(FLUX, rows, 4)[0], shares) for rows, shares in sizes.items()]
    images = run_ranks(decode, 3, cases)[0]
    with torch.inference_mode():
        for image, (latent, _) in zip(images, cases, strict=True):
            expected = random_vae(FLUX).decode(latent[None])[0].permute(1, 2, 0)
            assert (image - expected).abs().max() <= TOLERANCE * expected.abs().max()
