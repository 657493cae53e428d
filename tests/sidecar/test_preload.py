"""Models are loaded before their first request only if there is room: no held model is dropped for them."""

from __future__ import annotations

import threading

import pytest
import torch

from parallel_backend.errors import RequestError
from parallel_backend.sidecar import holdings, model_room, pool
from parallel_backend.sidecar.group.events import Loaded, RequestEnded
from parallel_backend.sidecar.model_room import Room
from parallel_backend.sidecar.sidecar import State
from parallel_backend.strategy import ParallelStrategy
from scripted import SLOW, call_model, scripted_request, scripted_sidecar, two_ranks
from waiting import wait_until

X = torch.ones(1, 4, 6, 6)


def scale_of(sidecar, spec):
    """Returns the factor that the ranks multiply by, and True if they already held the model."""
    velocity, info = call_model(sidecar, spec, X)
    return velocity[0, 0, 0, 0].item(), info.load.cached


def test_the_first_request_finds_the_model_there(sidecar, scaled, events):
    first, second = scaled(2.0), scaled(3.0)
    assert not sidecar.preload(first).cached and sidecar.state is State.READY  # ranks started for it
    assert scale_of(sidecar, first) == (2.0, True)
    assert not sidecar.preload(second).cached
    assert sidecar.preload(second).cached and sidecar.preload(first).cached  # again: nothing to do
    assert scale_of(sidecar, first) == (2.0, True) and scale_of(sidecar, second) == (3.0, True)
    assert sum(isinstance(event, Loaded) for event in events) == 2
    ended = [event for event in events if isinstance(event, RequestEnded) and event.request == "preload"]
    assert [event.result for event in ended] == ["done"] * 4 and ended[0].spec == first


def test_without_room_it_says_what_would_go_and_nothing_goes(sidecar, scaled, monkeypatch):
    """Each rank has room for 20 bytes. A model is estimated at 14 bytes, the size of its file; its weights take 8."""
    monkeypatch.setattr(model_room, "is_cpu", lambda devices: False)
    room = 20
    monkeypatch.setattr(
        holdings, "free_room", lambda ranks: Room(tuple(room - 8 * len(rank.models) for rank in ranks))
    )
    first, second = scaled(1.0, "  weighs 8"), scaled(2.0, "  weighs 8")
    sidecar.preload(first)
    with pytest.raises(RequestError, match=r"2.safetensors was not .*: 1.safetensors would .*lack of memory"):
        sidecar.preload(second)
    assert sidecar.models == (first,) and scale_of(sidecar, first) == (1.0, True)
    room = 30  # enough for both models
    sidecar.preload(second)
    assert scale_of(sidecar, first) == (1.0, True) and scale_of(sidecar, second) == (2.0, True)
    room = 10  # other programs took the rest, so dropping models would not help
    sidecar.drop(first)
    sidecar.drop(second)
    third = scaled(3.0, "  weighs 8")
    with pytest.raises(RequestError, match=r"3.safetensors was not .* GiB of memory are missing"):
        sidecar.preload(third)
    assert sidecar.state is State.READY


def test_memory_that_ends_on_the_way_costs_the_others_nothing(sidecar, scaled, events):
    first, second = scaled(1.0), scaled(2.0)
    sidecar.load(first)
    sidecar.load(second)
    pids = sidecar.pids
    with pytest.raises(RequestError, match=r"memory ended on the way\. What was loaded stays"):
        sidecar.preload(scaled(3.0, "no-memory 1"))
    assert scale_of(sidecar, first) == (1.0, True) and scale_of(sidecar, second) == (2.0, True)
    assert sidecar.pids == pids and sum(isinstance(event, Loaded) for event in events) == 2


def test_a_request_that_runs_is_not_waited_for(sidecar, scaled):
    first, second = scaled(1.0), scaled(2.0)
    steps = []
    job = threading.Thread(
        target=lambda: sidecar.sample(
            first, scripted_request(SLOW, steps=20), two_ranks(), on_step=lambda *step: steps.append(step)
        )
    )
    job.start()
    wait_until(lambda: steps)
    with pytest.raises(RequestError, match="a prompt is using the devices"):
        sidecar.preload(second)
    assert len(steps) < 20
    job.join()
    assert len(steps) == 20 and sidecar.models == (first,)


def test_ranks_on_some_of_the_devices_are_not_ended(no_leaks, scaled, monkeypatch):
    monkeypatch.setattr(pool, "Sidecar", lambda devices, exclusive: scripted_sidecar(devices))
    try:
        first = scaled(1.0)
        pool.preload(("cpu:0", "cpu:1"), first, ParallelStrategy())
        with pytest.raises(RequestError, match="processes on cpu:0, cpu:1 would end"):
            pool.preload(("cpu:1", "cpu:2"), first, ParallelStrategy())
        assert [sidecar.models for sidecar in pool.all_sidecars()] == [(first,)]
    finally:
        pool.stop_all()
