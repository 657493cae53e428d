"""No step reads values of tensors: on a GPU, the host would wait for all the work that it has given to the device."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from flux_requests import CONTEXT, POOLED, SIZES, request
from parallel_backend.engine.comm.groups import Layouts
from parallel_backend.rank.work import plain_job as loop
from parallel_backend.sampling.samplers import STEPS, USUAL_STEPS, Sigmas, run, start_history
from parallel_backend.strategy import ParallelStrategy
from plain_jobs import Boundary, PlainJobs
from ranks import run_ranks
from tiny_flux import write_tiny_flux

CASE = request(SIZES["odd sides"], 4.0, 1, positive_tokens=8, negative_tokens=5)
# In inference mode torch does not decompose the first two into the third.
_aten = torch.ops.aten
LOOKS = (_aten.item, _aten.is_nonzero, _aten._local_scalar_dense, _aten.equal, _aten.nonzero)
STRATEGIES = [
    ParallelStrategy(ulysses_degree=2),
    ParallelStrategy(ulysses_degree=2, head_groups=2),
    ParallelStrategy(ulysses_degree=2, sends_tokens=True),
    ParallelStrategy(ring_degree=2),
    ParallelStrategy(cfg_degree=2),
    ParallelStrategy(pipefusion_degree=2, num_pipeline_patch=3),
]


class Looks(TorchDispatchMode):
    """A counter of reads of tensors' values while `watching` is True: between the preparation of a job and its end."""

    def __init__(self):
        super().__init__()
        self.watching, self.count = False, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += self.watching and func.overloadpacket in LOOKS
        return func(*args, **(kwargs or {}))


class AtTheBoundary:
    """A call of the step boundary, whose reads do not count; tests/rank/work/test_step_boundary.py tests them."""

    def __init__(self, looks, call):
        self._looks, self._call = looks, call

    def __call__(self, *arguments):
        self._looks.watching = False
        try:
            return self._call(*arguments)
        finally:
            self._looks.watching = True


def count_looks(world, path, strategies):
    found, check = {}, loop.NumbersCheck.__call__
    for strategy in strategies:
        jobs, looks, counts = PlainJobs(Layouts(world)), Looks(), []
        loop.NumbersCheck.__call__ = lambda *arguments, looks=looks: AtTheBoundary(looks, check)(*arguments)
        for steps in (3, 4):  # with PipeFusion the host reads values once per job
            case = replace(CASE, sigmas=torch.linspace(0.95, 0, steps + 1))
            on_step, before = Boundary(), looks.count
            on_step.passed = AtTheBoundary(looks, on_step.passed)
            with looks:
                jobs.run(path, strategy, case, boundary=on_step)
            counts.append(looks.count - before)
        found[strategy.describe()] = counts[1] - counts[0]
        if strategy.pipefusion_degree == 1:
            assert counts == [0, 0]
    return found


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    folder = tmp_path_factory.mktemp("syncs")
    sizes = dict(heads=2, double_blocks=1, single_blocks=1, context_dim=CONTEXT, pooled_dim=POOLED)
    return str(write_tiny_flux(folder / "tiny.safetensors", **sizes))


def test_no_strategy_looks_at_a_devices_numbers_within_a_step(path):
    for found in run_ranks(count_looks, 2, path, STRATEGIES, backend="gloo"):
        assert found == dict.fromkeys(found, 0) and len(found) == len(STRATEGIES)


@pytest.mark.parametrize("step", dict.fromkeys((*STEPS.values(), *USUAL_STEPS.values())))
def test_no_sampler_looks_at_a_devices_numbers_within_a_step(step):
    x, looks = torch.randn(1, 4, 6, 6), Looks()
    sigmas, history = Sigmas(torch.linspace(0.95, 0, 5), x.device), start_history(0, x.device)
    with looks:
        looks.watching = True
        for i in range(4):
            x, _ = run(step(x, sigmas, i, history), lambda x, sigma: x / 2)
    assert looks.count == 0 and x.isfinite().all()
