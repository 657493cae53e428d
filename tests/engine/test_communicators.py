"""The communicators that exist after a job are those that the memory prediction counts.

Every test that runs a strategy by `run_ranks` shows that it communicates in an order that NCCL accepts: ranks have
NCCL's semantics there unless a test asks for gloo."""

from __future__ import annotations

import pytest
import torch

from flux_requests import CONTEXT, POOLED, SIZES, request
from nccl_semantics import NCCL_STREAMS, count_connected
from parallel_backend.engine.comm.collectives import broadcast
from parallel_backend.engine.comm.groups import Layouts
from parallel_backend.planner.workload.communicators import count_communicators
from parallel_backend.rank.outcome.progress import RequestLink
from parallel_backend.rank.work.step_boundary import StepBoundary
from parallel_backend.strategy import ParallelStrategy
from plain_jobs import PlainJobs
from ranks import run_ranks
from tiny_flux import write_tiny_flux

STEPS = 2
CASE = request(SIZES["odd sides"], 4.0, 1, positive_tokens=8, negative_tokens=5, steps=STEPS)


class NoLink:
    """A rank's link to a parent process that sends nothing."""

    def receive(self, timeout):
        return None

    def send(self, envelope, descriptors):
        pass


def communicators(world, path, each):
    """Returns the number of this rank's communicators after its first job. The broadcast stands for ComfyUI's loop."""
    boundary = StepBoundary(
        RequestLink(NoLink(), epoch=0, request=0, rank=world.rank),
        control=world.control,
        device=world.device,
        steps=STEPS,
        previews=False,
    )
    layouts = Layouts(world)
    PlainJobs(layouts).run(path, each, CASE, boundary=boundary)
    broadcast(torch.zeros(1), 0, layouts.get(each).everyone, layouts.traffic)
    return count_connected()


@pytest.mark.parametrize(
    "each",
    [
        ParallelStrategy(ring_degree=2, ulysses_degree=2),
        ParallelStrategy(cfg_degree=2, ulysses_degree=2, shard_weights=True),
        ParallelStrategy(pipefusion_degree=2, cfg_degree=2, warmup_steps=1, num_pipeline_patch=2),
        ParallelStrategy(pipefusion_degree=3, warmup_steps=1, num_pipeline_patch=2),
    ],
    ids=ParallelStrategy.describe,
)
def test_the_memory_prediction_counts_the_communicators_that_come_up(tmp_path, each):
    sizes = dict(heads=2, double_blocks=1, single_blocks=3, context_dim=CONTEXT, pooled_dim=POOLED)
    path = str(write_tiny_flux(tmp_path / "tiny.safetensors", **sizes))
    found = run_ranks(communicators, each.world_size, path, each, backend=NCCL_STREAMS)
    assert found == [count_communicators(each, rank) for rank in range(each.world_size)]
