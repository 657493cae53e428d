"""Ranks start before their first request and import what its model needs."""

from __future__ import annotations

import pytest
import torch

from parallel_backend.errors import RequestError
from parallel_backend.requests import ComfyUISource, ModelSpec
from parallel_backend.sidecar import pool
from parallel_backend.sidecar.group.events import RequestEnded
from parallel_backend.sidecar.sidecar import Sidecar, State
from scripted import call_model, scripted_sidecar

X = torch.ones(1, 4, 6, 6)


def test_the_first_request_finds_them_started_with_nothing_loaded(sidecar, scaled, events):
    model = scaled(2.0)
    sidecar.prepare(model)
    assert sidecar.state is State.READY and sidecar.models == ()
    pids = sidecar.pids
    velocity, info = call_model(sidecar, model, X)
    assert velocity[0, 0, 0, 0].item() == 2.0 and not info.load.cached and sidecar.pids == pids
    assert [event.request for event in events if isinstance(event, RequestEnded)] == ["start", "sample"]


def test_ranks_that_run_keep_what_they_have(sidecar, scaled):
    model = scaled(2.0)
    call_model(sidecar, model, X)
    sidecar.prepare(model)
    assert sidecar.models == (model,)


def test_they_import_the_models_comfyui(no_leaks, tmp_path):
    """A ComfyUI that does not exist shows that they try."""
    sidecar = Sidecar(("cpu:2",))
    try:
        nowhere = ComfyUISource(str(tmp_path / "nowhere"))
        with pytest.raises(RequestError, match="nowhere"):
            sidecar.prepare(ModelSpec("model.safetensors", "comfyui", comfyui=nowhere))
        assert sidecar.state is State.READY
    finally:
        sidecar.stop()


@pytest.mark.parametrize("busy", [False, True])
def test_on_devices_where_ranks_run_nothing_starts(no_leaks, scaled, monkeypatch, busy):
    model = scaled(2.0)
    monkeypatch.setattr(pool, "Sidecar", lambda devices, exclusive: scripted_sidecar(devices))
    try:
        if busy:
            pool.prepare(("cpu:1", "cpu:2"), model)
        pool.prepare(("cpu:0", "cpu:1"), model)
        running = [sidecar.devices for sidecar in pool.all_sidecars() if sidecar.pids]
        assert running == [("cpu:1", "cpu:2") if busy else ("cpu:0", "cpu:1")]
    finally:
        pool.stop_all()
