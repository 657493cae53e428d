"""What a rank keeps from one model call of ComfyUI's own loop to the next: a step cache, as long as a run lasts."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from parallel_backend.engine.comm.traffic_counter import Traffic
from parallel_backend.errors import StrategyError
from parallel_backend.rank.module_calls import ModuleCalls
from parallel_backend.requests import Placement, Reuse
from parallel_backend.strategy import ParallelStrategy
from parallel_backend.wire.arguments import pack_arguments
from parallel_backend.wire.protocol import Call


class Forward:
    """Counts as a module's forward would that reuses every second call."""

    engine, kernel, notes, exact, bytes_sent, compiles = "native", "torch", [], True, 0, False
    model = SimpleNamespace(module=None)

    def __init__(self):
        self.seen = []  # (cache, its threshold, prompts) of each call

    def __call__(self, call, cache=None):
        self.seen.append((cache, cache and cache.threshold, call.prompts))
        if cache is not None:
            cache.reused += cache.calls % 2
            cache.calls += 1
            cache._kept[call.prompts, "strategy"] = []
        return call.args[0] + 1


@pytest.fixture
def calls():
    world = SimpleNamespace(rank=0, world_size=1, device=torch.device("cpu"))
    return ModuleCalls(world, Traffic())


def make(calls, forward, reuse=None, strategy=None):
    message = Call(Placement(strategy or ParallelStrategy()), "forward", 1, "block", 1, reuse=reuse)
    answer, run = calls.make(message, pack_arguments(((torch.ones(2),), {})), lambda: forward)
    assert answer["0"].tolist() == [2.0, 2.0]
    return run


def test_calls_of_a_run_share_a_cache_and_each_says_what_it_reused(calls):
    forward = Forward()
    runs = [make(calls, forward, Reuse(7, like, 0.1)) for like in (1, 1, 2)]
    caches = [cache for cache, _, _ in forward.seen]
    assert caches[0] is caches[1] is caches[2] is not None
    assert [prompts for *_, prompts in forward.seen] == [(1,), (1,), (2,)]
    assert [(run.model_calls, run.reused_calls, run.exact) for run in runs] == [
        (1, 0, True),
        (1, 1, False),
        (1, 0, True),
    ]


def test_a_call_without_a_kind_is_whole_and_leaves_the_others_what_they_have(calls):
    forward = Forward()
    runs = [make(calls, forward, reuse) for reuse in (Reuse(7, 1, 0.1), Reuse(7), Reuse(7, 1, 0.0))]
    first, whole, last = forward.seen
    assert whole == (None, None, ()) and runs[1].model_calls == 0
    assert last[0] is first[0] and (first[1], last[1]) == (0.1, 0.0)


def test_after_the_last_call_of_a_kind_nothing_of_it_is_kept(calls):
    forward = Forward()
    for reuse in (Reuse(7, 1, 0.1), Reuse(7, 2, 0.1), Reuse(7, 1, 0.1, last=True)):
        make(calls, forward, reuse)
    cache, *_ = forward.seen[0]
    assert list(cache._kept) == [((2,), "strategy")]


@pytest.mark.parametrize("between", ["another run", "a run without", "nobody asked", "sleep"])
def test_what_is_kept_ends_with_its_run(calls, between):
    forward = Forward()
    make(calls, forward, Reuse(7, 1, 0.1))
    if between == "another run":
        make(calls, forward, Reuse(8, 1, 0.1))
    elif between == "a run without":
        make(calls, forward)
    elif between == "nobody asked":
        calls.end_run()
    else:
        calls.clear()
    make(calls, forward, Reuse(7, 1, 0.1))
    assert forward.seen[-1][0] is not None and forward.seen[-1][0] is not forward.seen[0][0]


def test_stages_of_a_pipeline_are_refused(calls):
    with pytest.raises(StrategyError, match="step_cache does not go with pipefusion_degree 2"):
        make(calls, Forward(), Reuse(7, 1, 0.1), ParallelStrategy(pipefusion_degree=2))
