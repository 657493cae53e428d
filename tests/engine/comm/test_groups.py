"""The layout of ranks: which ranks share an axis, and the refusal of a strategy for another number of ranks."""

import threading

import pytest
import torch

from parallel_backend.engine.comm import groups
from parallel_backend.engine.comm.groups import PATIENCE, Layouts, World, rank_groups
from parallel_backend.errors import RequestError
from parallel_backend.strategy import ParallelStrategy
from parallel_backend.wire.heartbeat import Heartbeat
from waiting import wait_until


def test_ulysses_neighbours_are_adjacent_and_cfg_is_far():
    strategy = ParallelStrategy(cfg_degree=2, ring_degree=2, ulysses_degree=2)
    assert rank_groups(strategy, ("ulysses",)) == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert rank_groups(strategy, ("ring",)) == [(0, 2), (1, 3), (4, 6), (5, 7)]
    assert rank_groups(strategy, ("ring", "ulysses")) == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert rank_groups(strategy, ("data", "cfg")) == [(0, 4), (1, 5), (2, 6), (3, 7)]


def test_an_axis_of_degree_one_has_only_the_rank_itself():
    assert rank_groups(ParallelStrategy(ulysses_degree=3), ("cfg",)) == [(0,), (1,), (2,)]


def test_a_strategy_of_another_size_is_refused_with_both_numbers():
    world = World(rank=0, world_size=1, device=torch.device("cpu"), backend="gloo", store_path="unused")
    with pytest.raises(RequestError, match="needs 2 ranks and this group has 1"):
        Layouts(world).get(ParallelStrategy(ring_degree=2))


def test_no_group_gives_up_before_the_supervisor_does(monkeypatch, tmp_path):
    """One device's first step may take longer than NCCL's timeout, while the others wait for its output."""
    given = []

    def take(*_, timeout=None, store=None, **__):
        given.append((timeout, None if store is None else store.timeout))

    for name in ("init_process_group", "new_group"):
        monkeypatch.setattr(groups.dist, name, take)
    monkeypatch.setattr(groups, "_connect_stages", lambda layout: None)
    world = World(
        rank=0, world_size=4, device=torch.device("cpu"), backend="nccl", store_path=str(tmp_path / "store")
    )
    Layouts(world).get(ParallelStrategy(cfg_degree=2, ulysses_degree=2))
    assert given[0] == (PATIENCE, PATIENCE) and len(given) > 2
    assert {timeout for timeout, _ in given} == {PATIENCE}


def test_every_thread_of_a_rank_computes_on_its_gpu(monkeypatch):
    """CUDA gives a new thread the first GPU, and a call there allocates memory for a context."""
    chosen: list[tuple[threading.Thread, torch.device]] = []

    def failed():
        raise RuntimeError("CUDA error")  # ends the heartbeat's thread

    before, heartbeat, gpu = set(threading.enumerate()), Heartbeat(), torch.device("cuda:1")
    monkeypatch.setattr(heartbeat, "look", failed)
    monkeypatch.setattr(groups, "heartbeat", heartbeat)
    monkeypatch.setattr(groups, "stay_near", lambda device: None)
    monkeypatch.setattr(
        torch.cuda, "set_device", lambda device: chosen.append((threading.current_thread(), device))
    )
    World(rank=0, world_size=1, device=gpu, backend="nccl", store_path="unused")
    wait_until(lambda: len(chosen) == 2 and not set(threading.enumerate()) - before)
    assert [device for _, device in chosen] == [gpu, gpu]
    (own, _), (of_heartbeat, _) = chosen
    assert own is threading.current_thread() and of_heartbeat.name == "heartbeat"
