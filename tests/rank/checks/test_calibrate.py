"""Ranks measure their links: on real gloo ranks, within the budget, and through a real sidecar."""

from itertools import product
from types import SimpleNamespace

import pytest
import torch

from nccl_semantics import NCCL_SEMANTICS
from parallel_backend.engine.attention import kernel_choice as attention
from parallel_backend.engine.comm.groups import Layouts
from parallel_backend.errors import StrategyError
from parallel_backend.rank.checks import calibrate as rank_calibrate
from parallel_backend.requests import Placement
from parallel_backend.strategy import ParallelStrategy
from parallel_backend.wire.calibration import (
    ALL_TO_ALL,
    PAIR,
    POINT_TO_POINT,
    Calibration,
    Transfer,
    slowest_rate,
)
from parallel_backend.wire.protocol import Calibrate
from ranks import run_ranks

SMALL = (65536, 4 * 65536)  # bytes


@pytest.fixture(autouse=True)
def brief(monkeypatch):
    """Makes ranks, which are forks of this process, send a few small messages, however large the budget is."""
    monkeypatch.setattr(rank_calibrate, "SIZES", SMALL)
    monkeypatch.setattr(rank_calibrate, "MOST_REPETITIONS", 2)


def _calibrate(world, strategy, budget_s, thorough):
    found = rank_calibrate.calibrate(
        world, Layouts(world).get(strategy), Calibrate(strategy, budget_s, thorough)
    )
    return {
        "transfers": [[t.kind, t.size, t.sent, t.seconds, t.peer, t.intact] for t in found.transfers],
        "collective_s": found.collective_s,
        "facts": None if found.facts is None else [*found.facts.peers, found.facts.all_reduce_error],
    }


def test_every_kind_and_size_is_measured_on_every_rank():
    for found in run_ranks(_calibrate, 2, ParallelStrategy(ulysses_degree=2), 20.0, False):
        kinds = [(kind, size, sent) for kind, size, sent, *_ in found["transfers"]]
        expected = []
        for size in SMALL:
            expected += [(POINT_TO_POINT, size, size), (ALL_TO_ALL, size, size // 2)]
        assert kinds == expected
        assert all(seconds > 0 for _, _, _, seconds, _, _ in found["transfers"])
        assert found["collective_s"] > 0 and found["facts"] is None


def test_groups_that_do_not_divide_the_sizes_are_measured_and_what_arrives_is_looked_at():
    for rank, found in enumerate(run_ranks(_calibrate, 3, ParallelStrategy(ring_degree=3), 20.0, True)):
        pairs = [(size, peer) for kind, size, _, _, peer, _ in found["transfers"] if kind == PAIR]
        assert pairs == [(size, peer) for peer in range(3) if peer != rank for size in SMALL]
        assert all(intact for *_, intact in found["transfers"])
        assert found["facts"] == [True, True, True, 0.0]


def _calibrate_corrupted(world, strategy):
    """Calibrates while rank 1 sends other data than the other rank expects."""
    honest = rank_calibrate._pattern
    if world.rank == 1:
        rank_calibrate._pattern = lambda rank, size, world: honest(rank + (rank == 1), size, world)
    return _calibrate(world, strategy, 20.0, True)


def test_what_arrives_altered_is_told_by_the_rank_that_received_it():
    results = run_ranks(_calibrate_corrupted, 2, ParallelStrategy(ring_degree=2))
    broken = [{kind for kind, *_, intact in found["transfers"] if not intact} for found in results]
    assert broken == [{POINT_TO_POINT, ALL_TO_ALL, PAIR}, set()]


def test_a_spent_budget_leaves_out_what_is_left_on_all_ranks_alike():
    first, second = run_ranks(_calibrate, 2, ParallelStrategy(ring_degree=2), 0.0, True)
    assert first["transfers"] == second["transfers"] == []
    assert first["collective_s"] > 0  # cheap measurements are made once in any case


def _slow_to_connect(world, strategy):
    """Calibrates by a fake clock: a group's first exchange takes 30 s, far more than the budget, the next ones 1 ms."""
    now, met = [0.0], set()
    rank_calibrate.time = SimpleNamespace(perf_counter=lambda: now[0])
    makers = {name: getattr(rank_calibrate, name) for name in ("_to_next", "_to_all", "_there_and_back")}
    for name in makers:

        def made(*arguments, name=name, make=makers[name]):
            exchange, expected, sent = make(*arguments)

            def connecting():
                # `arguments` without the size and the world: the group, or the pair
                key = name, *(getattr(a, "ranks", a) for a in arguments[1:-1])
                now[0] += 0.001 if key in met else 30.0
                met.add(key)
                return exchange()

            return connecting, expected, sent

        setattr(rank_calibrate, name, made)
    return _calibrate(world, strategy, 2.0, True)


def test_connections_that_come_up_slowly_take_nothing_from_the_budget():
    expected = set(product((POINT_TO_POINT, ALL_TO_ALL, PAIR), SMALL))
    for found in run_ranks(_slow_to_connect, 2, ParallelStrategy(ring_degree=2)):
        assert {(kind, size) for kind, size, *_ in found["transfers"]} == expected


def _groups_used(world, strategy):
    """Returns the connected communicators of each group after calibration."""
    layouts = Layouts(world)
    layout = layouts.get(strategy)
    rank_calibrate.calibrate(world, layout, Calibrate(strategy, 5.0, False))
    axes = {"ulysses": layout.ulysses, "row": layout.row, "pipe": layout.pipe}
    groups = {"world": world.group} | {
        name: axis.group for name, axis in axes.items() if axis.group is not None
    }
    return {name: sorted(group.connected) for name, group in groups.items()}


@pytest.mark.parametrize(
    ("degrees", "used"),
    [
        ({"cfg_degree": 2, "ulysses_degree": 2}, {"ulysses": ["group"]}),
        ({"cfg_degree": 2, "pipefusion_degree": 2}, {"row": ["group"], "pipe": ["0-1"]}),
    ],
)
def test_only_groups_that_the_strategy_uses_are_connected(degrees, used):
    for found in run_ranks(_groups_used, 4, ParallelStrategy(**degrees), backend=NCCL_SEMANTICS):
        assert {name: groups for name, groups in found.items() if groups} == used


def _calibrate_without_memory(world, strategy):
    honest = rank_calibrate._empty

    def refuse(size, world):
        if world.rank == 1 and size > SMALL[0]:
            raise torch.OutOfMemoryError("no memory for that")
        return honest(size, world)

    rank_calibrate._empty = refuse
    return _calibrate(world, strategy, 20.0, False)


def test_a_rank_without_memory_for_a_size_leaves_it_out_everywhere():
    for found in run_ranks(_calibrate_without_memory, 2, ParallelStrategy(ring_degree=2)):
        assert {size for _, size, *_ in found["transfers"]} == {SMALL[0]}


def test_one_rank_has_no_links():
    (found,) = run_ranks(_calibrate, 1, ParallelStrategy(), 2.0, False)
    assert found["transfers"] == [] and found["collective_s"] == 0.0


def test_a_sidecar_measures_before_it_holds_a_model_and_stays_usable(two_real_ranks):
    sidecar = two_real_ranks
    sidecar.sleep()
    assert sidecar.models == ()
    placement = Placement(ParallelStrategy(ulysses_degree=2))
    first = sidecar.calibrate(placement, budget_s=5.0)
    pids = sidecar.pids
    assert [c.rank for c in first] == [0, 1] and {c.backend for c in first} == {"gloo"}
    assert slowest_rate(first, ALL_TO_ALL) > 1e6
    thorough = sidecar.calibrate(placement, thorough=True)
    assert sidecar.pids == pids
    assert [c.facts.kernel for c in thorough] == ["torch", "torch"]
    assert [c.facts.kernel_problem for c in thorough] == ["", ""]
    with pytest.raises(StrategyError):
        sidecar.calibrate(Placement())


def test_the_slowest_rank_and_the_largest_measured_size_decide():
    def at(rank, *transfers):
        return Calibration(rank, "gloo", ParallelStrategy(ring_degree=2), transfers, 1e-4)

    both = (
        at(0, Transfer(POINT_TO_POINT, 64, 64, 1.0), Transfer(POINT_TO_POINT, 4096, 4096, 1.0)),
        at(1, Transfer(POINT_TO_POINT, 64, 64, 2.0), Transfer(POINT_TO_POINT, 4096, 4096, 4.0)),
    )
    assert slowest_rate(both, POINT_TO_POINT) == 1024
    assert slowest_rate(both, POINT_TO_POINT, 64) == 32
    assert slowest_rate(both, ALL_TO_ALL) is None


def test_a_kernel_that_raises_is_a_problem_and_no_end(monkeypatch):
    def broken(device, dtype):
        raise ImportError("undefined symbol")

    monkeypatch.setattr(attention, "kernel_for", broken)
    assert rank_calibrate._try_kernel(torch.device("cpu")) == ("", "ImportError: undefined symbol")
