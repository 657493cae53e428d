"""Processes that start when a prompt names its model, before its sampler asks for them."""

import logging
import os
import threading
from types import SimpleNamespace

import pytest

from jobs import flux_file
from pack_nodes import module_fixture
from parallel_backend.errors import DeviceError
from parallel_backend.planner.rules import StrategySettings
from parallel_backend.requests import ModelSpec
from parallel_backend.sidecar import pool

CPUS = ("cpu:0", "cpu:1")
TWO = StrategySettings(devices="cpu:2")
THREAD = "parallel-early-start"

module = module_fixture("nodes.preload.early_start")


@pytest.fixture
def seen(module, monkeypatch):
    """The module in a running prompt, with enough cores; `asked`: calls of pool.prepare, `rooms`: of leave_room_for."""
    found = SimpleNamespace(module=module, asked=[], rooms=[], node=object(), allowed=True)
    monkeypatch.setattr(module, "get_executing_context", lambda: found.node)
    monkeypatch.setattr(module, "setting", lambda name: found.allowed)
    monkeypatch.setattr(module, "has_cores", lambda devices: True)
    monkeypatch.setattr(
        pool, "prepare", lambda *job: found.asked.append((*job, threading.current_thread().name))
    )
    monkeypatch.setattr(pool, "leave_room_for", lambda *room: found.rooms.append(room))
    found.model = SimpleNamespace(spec=ModelSpec("/models/flux.safetensors"), file=flux_file())
    return found


def _started(found):
    found.module.start_early(found.model, TWO)
    for thread in [one for one in threading.enumerate() if one.name == THREAD]:
        thread.join()
    return found.asked


def test_a_prompt_that_names_a_model_starts_its_processes(seen):
    assert _started(seen) == [(CPUS, seen.model.spec, THREAD)]


def test_text_encoders_leave_room_for_its_weights(seen, monkeypatch):
    plan = SimpleNamespace(devices=CPUS, memory=SimpleNamespace(weights=12 * 2**30))
    monkeypatch.setattr(seen.module, "plan_by_rule", lambda settings, job: plan)
    _started(seen)
    assert seen.rooms == [(CPUS, seen.model.spec, 12 * 2**30)]


def test_nothing_starts_outside_a_prompt_or_against_the_setting_or_without_cores(seen, monkeypatch):
    seen.node = None  # no prompt runs, as when Preload names a model
    assert _started(seen) == []
    seen.node, seen.allowed = object(), False
    assert _started(seen) == []
    seen.allowed = True
    monkeypatch.setattr(seen.module, "has_cores", lambda devices: False)
    assert _started(seen) == []


def test_what_goes_wrong_is_left_to_the_sampler_to_tell(seen, monkeypatch, caplog):
    def fail(devices, spec):
        raise DeviceError("GPU 0 is another process's.")

    monkeypatch.setattr(pool, "prepare", fail)
    with caplog.at_level(logging.INFO):
        assert _started(seen) == []
    assert "GPU 0 is another process's" in caplog.text


@pytest.mark.parametrize(
    ("devices", "cores", "enough"),
    [
        (("cuda:0",), 3, True),
        (("cuda:0", "cuda:1"), 3, False),
        (("cuda:0", "cuda:1"), 4, True),
        (CPUS, 64, False),
        (("cuda:0@lab/one", "cuda:0@lab/two"), 64, False),
    ],
)
def test_each_process_imports_on_a_core_that_comfyui_can_spare(module, monkeypatch, devices, cores, enough):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)))
    assert module.has_cores(devices) is enough
