"""Several models on the same ranks: each is loaded once, the oldest is dropped first, and none affects another."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch

from comfy_weight_files import CPU, inputs
from comfy_weight_files import spec as module_spec
from comfy_weight_files import write as write_module
from differences import relative_difference
from parallel_backend.errors import CheckpointError, OutOfMemory
from parallel_backend.models.comfyui.load import load
from parallel_backend.requests import Placement
from parallel_backend.sidecar import holdings, model_room, pool
from parallel_backend.sidecar.group.events import Loaded
from parallel_backend.sidecar.group.exchange import Exchange
from parallel_backend.sidecar.model_room import Room
from parallel_backend.sidecar.sidecar import State
from parallel_backend.strategy import ParallelStrategy
from parallel_backend.wire import deadlines
from parallel_backend.wire.protocol import MoveOut, RunJob, TakeBack
from scripted import NO_MEMORY, call_model, is_held, is_running, scripted_request, two_ranks
from shipped_jobs import ship_call
from waiting import wait_until

X = torch.ones(1, 4, 6, 6)


@pytest.fixture
def sent(monkeypatch):
    """The messages that ranks get while the test runs."""
    messages, send = [], Exchange.send

    def noted(self, message, tensors=None):
        messages.append(message)
        send(self, message, tensors)

    monkeypatch.setattr(Exchange, "send", noted)
    return messages


@pytest.fixture
def held(sidecar, scaled):
    """Two models that ranks have loaded one after the other; their scales are 2 and 3."""
    both = scaled(2.0), scaled(3.0)
    for spec in both:
        sidecar.load(spec)
    return both


@pytest.fixture
def heavy(sidecar, scaled, sent, monkeypatch):
    """A model of scale 2 that has 1000 bytes on each rank of the pool's only sidecar."""
    spec = scaled(2.0, "weighs 1000")
    sidecar.load(spec)
    sent.clear()
    monkeypatch.setattr(pool, "_sidecars", {sidecar.devices: sidecar})
    return spec


def loaded(events):
    """Returns the names of the files that ranks have loaded while the test runs."""
    return [Path(event.spec.path).name for event in events if isinstance(event, Loaded)]


def scale_of(sidecar, spec, behaviour=0):
    """Returns the factor that the ranks multiply by, and the LoadInfo of the call."""
    velocity, info = call_model(sidecar, spec, X, behaviour)
    assert (velocity == velocity[0, 0, 0, 0]).all()
    return velocity[0, 0, 0, 0].item(), info.load


def test_two_models_in_turn_are_loaded_once_each_and_keep_their_own_prompts(sidecar, scaled, events):
    high, low = scaled(2.0), scaled(3.0)
    phases = []
    for turn in range(3):
        for spec, scale in ((high, 2.0), (low, 3.0)):
            found, load = scale_of(sidecar, spec)
            assert found == scale
            assert (load.cached, load.switched) == (turn > 0, turn > 0)
            again, load = scale_of(sidecar, spec)
            assert again == scale and load.cached and not load.switched and load.seconds == 0.0
    assert loaded(events) == ["2.safetensors", "3.safetensors"]
    assert sidecar.models == (low, high)
    assert sidecar.status().models == ("3.safetensors", "2.safetensors")
    info = sidecar.load(high, two_ranks().strategy, on_phase=phases.append)
    assert phases == ["switched to 2.safetensors"]
    assert info.model == "2.safetensors" and 0 < info.seconds < 0.05 and info.notes == ()


def test_memory_that_ends_in_a_load_costs_the_oldest_only_and_is_told(sidecar, scaled, events, held):
    (first, second), third = held, scaled(4.0, "no-memory 1")
    pids, phases = sidecar.pids, []
    info = sidecar.load(third, on_phase=phases.append)
    assert info.notes == ("dropped 2.safetensors: for lack of memory",)
    assert "dropped 2.safetensors: for lack of memory" in phases
    assert sidecar.models == (third, second)
    assert scale_of(sidecar, second)[0] == 3.0 and scale_of(sidecar, third)[0] == 4.0
    assert not sidecar.load(first).cached  # the third stays loaded
    assert sidecar.pids == pids and loaded(events) == [f"{name}.safetensors" for name in (2, 3, 4, 2)]


def test_on_gpus_what_is_free_decides_and_what_a_model_took_is_remembered(sidecar, scaled, monkeypatch):
    """Each rank has room for 20 bytes. A model is estimated at 14 bytes, the size of its file; its weights take 8."""
    monkeypatch.setattr(model_room, "is_cpu", lambda devices: False)
    monkeypatch.setattr(
        holdings, "free_room", lambda ranks: Room(tuple(20 - 8 * len(rank.models) for rank in ranks))
    )
    first, second, third = (scaled(float(scale), "  weighs 8") for scale in (1, 2, 3))
    sidecar.load(first)
    assert sidecar.load(second).notes == ("dropped 1.safetensors: for lack of memory",)  # 14 > 12
    assert sidecar.load(first).notes == ()  # 8 <= 12
    assert sidecar.models == (first, second)
    assert sidecar.load(third).notes == tuple(  # 14 > 4, and 14 > 12
        f"dropped {name}.safetensors: for lack of memory" for name in (2, 1)
    )
    assert sidecar.models == (third,)


def test_a_model_that_does_not_fit_alone_costs_all_others_and_leaves_the_ranks(sidecar, scaled, held):
    first, second = held
    pids = sidecar.pids
    with pytest.raises(OutOfMemory, match=r"cpu.*tried to load a lot.*Use"):
        sidecar.load(scaled(4.0, "no-memory always"))
    assert sidecar.models == ()
    assert not sidecar.load(second).cached and scale_of(sidecar, first)[0] == 2.0
    assert sidecar.pids == pids


@pytest.mark.parametrize("rank", [0, 1])
def test_a_file_that_one_rank_refuses_costs_none_of_the_others(sidecar, scaled, held, rank):
    first, second = held
    pids = sidecar.pids
    with pytest.raises(CheckpointError, match=f"refused by process {rank}"):
        sidecar.load(scaled(4.0, f"refused {rank}"))
    assert sidecar.load(first).cached and sidecar.load(second).cached
    assert sidecar.models == (second, first)
    assert scale_of(sidecar, second)[0] == 3.0 and sidecar.pids == pids


def test_what_was_dropped_before_a_refusal_is_not_taken_for_held(sidecar, scaled, held):
    """Rank 1 lacks memory for the file, then refuses it once models were dropped for it: these are gone."""
    first, second = held
    with pytest.raises(CheckpointError, match="refused by process 1"):
        sidecar.load(scaled(4.0, "no-memory-then-refused 1"))
    assert not sidecar.load(first).cached
    assert scale_of(sidecar, first)[0] == 2.0 and scale_of(sidecar, second)[0] == 3.0


def test_a_file_that_changed_is_loaded_anew_and_its_old_copy_dropped(sidecar, held, tmp_path):
    high, low = held
    (tmp_path / "2.safetensors").write_text("good 7.25")
    found, load = scale_of(sidecar, high)
    assert found == 7.25 and load.notes == ("dropped 2.safetensors: its file has changed",)
    assert sidecar.models == (high, low)
    assert scale_of(sidecar, low)[1].switched


def test_two_models_sleep_and_wake_together(sidecar, events, held):
    high, low = held
    sidecar.sleep()
    assert sidecar.models == () and sidecar.state is State.ASLEEP and not is_held(low)
    sidecar.wake()
    assert sidecar.models == (low, high) and sidecar.state is State.READY
    assert sidecar.load(high).cached and scale_of(sidecar, low)[0] == 3.0
    assert len(loaded(events)) == 4
    sidecar.sleep()
    assert scale_of(sidecar, high)[0] == 2.0  # the request wakes the ranks
    assert sidecar.models == (high,)


def test_one_of_two_gives_its_memory_back_alone(sidecar, held, monkeypatch):
    high, low = held
    monkeypatch.setattr(pool, "_sidecars", {sidecar.devices: sidecar})
    pool.put_to_sleep(high)
    assert sidecar.state is State.READY and sidecar.models == (low,)
    assert is_held(low) and not is_held(high)
    assert not scale_of(sidecar, high)[1].cached
    pool.put_to_sleep(high)
    pool.put_to_sleep(low)
    assert sidecar.state is State.ASLEEP and not is_held(low)


def test_a_crash_of_idle_ranks_is_noticed_and_forgets_all(sidecar, held):
    high, low = held
    victim, survivor = sidecar.pids
    os.kill(victim, signal.SIGKILL)
    wait_until(lambda: sidecar.state is State.FAILED and not is_running(survivor))
    assert scale_of(sidecar, high)[0] == 2.0
    assert sidecar.models == (high,)
    assert not sidecar.load(low).cached


def test_a_call_that_finds_no_memory_beside_others_is_made_again_alone(sidecar, held, monkeypatch):
    monkeypatch.setattr(deadlines, "REPORT", 0.5)
    high, low = held
    assert scale_of(sidecar, low)[0] == 3.0
    found, load = scale_of(sidecar, low, NO_MEMORY)
    assert found == 3.0
    assert "dropped 2.safetensors: memory ended in a request beside it" in load.notes[0]
    assert sidecar.models == (low,)
    assert "one at a time" in sidecar.load(high).notes[0] and sidecar.models == (high,)


def test_a_job_that_finds_no_memory_alone_either_leaves_room_for_several(sidecar, held, monkeypatch):
    monkeypatch.setattr(deadlines, "REPORT", 0.5)
    high, low = held
    with pytest.raises(OutOfMemory):
        sidecar.sample(low, scripted_request(NO_MEMORY), two_ranks())
    sidecar.load(high)
    sidecar.load(low)
    assert sidecar.models == (low, high)


def test_two_sharded_modules_of_comfyuis_share_the_ranks(two_real_ranks, tmp_path):
    """tests/comfy/test_rank_memory.py has whole ones."""
    placement = Placement(ParallelStrategy(ulysses_degree=2, shard_weights=True))
    high, low = (
        module_spec(write_module(tmp_path / f"{name}.safetensors", name))
        for name in ("bf16", "float8_e4m3fn")
    )
    args, kwargs = inputs()

    def alone(spec):
        with torch.inference_mode():
            return load(spec, CPU).module(*args, **kwargs)

    wanted = {high: alone(high), low: alone(low)}
    assert relative_difference(wanted[high], wanted[low]) > 1e-3
    for turn in range(2):
        for spec in (high, low):
            result = two_real_ranks.sample(spec, ship_call(spec, args, kwargs), placement)
            answer, info = result.latent, result.info
            assert relative_difference(answer, wanted[spec]) <= 1e-5
            assert info.load.switched == info.load.cached == bool(turn)


def test_only_the_rank_on_the_device_that_is_needed_gives_its_memory_back(sidecar, events, sent, heavy):
    spec = heavy
    pool.give_back(spec, "cpu:7")
    assert sent == [] and pool.bytes_on(spec, "cpu:7") == 0
    pool.give_back(spec, "cpu:0")
    pool.give_back(spec, "cpu:0")  # it has done so already
    number = sidecar._holdings.current.number
    assert sent == [MoveOut(0, number)]
    assert (pool.bytes_on(spec, "cpu:0"), pool.bytes_on(spec, "cpu:1")) == (0, 1000)
    assert sidecar.state is State.READY and sidecar.models == (spec,)
    assert scale_of(sidecar, spec)[0] == 2.0 and [type(one) for one in sent[1:]] == [TakeBack, RunJob]
    assert pool.bytes_on(spec, "cpu:0") == 1000 and len(loaded(events)) == 1
    sidecar.sleep()
    assert pool.bytes_on(spec, "cpu:0") == 0


def test_without_room_in_host_memory_all_ranks_give_the_model_up(sidecar, events, heavy, monkeypatch):
    spec = heavy
    monkeypatch.setattr(model_room, "available_memory", lambda total: 0)
    sidecar.give_back(spec, "cpu:0")
    assert sidecar.models == () and sidecar.held.bytes_on(spec, "cpu:1") == 0
    assert scale_of(sidecar, spec)[0] == 2.0 and len(loaded(events)) == 2
