"""Which ranks decode and encode: those that would have to load a model again stay, whatever was chosen since."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from comfy_modules import import_comfyui_here
from pack_nodes import import_node_module
from parallel_backend.errors import OutOfMemory
from parallel_backend.planner.rules import StrategySettings
from parallel_backend.sidecar import pool
from parallel_backend.sidecar.group.lease import State

CHOSEN = ("cpu:0", "cpu:1")


@pytest.mark.parametrize(
    ("state", "models", "used"),
    [
        (State.READY, ("a model",), 1),
        (State.ASLEEP, (), 1),  # its model was put away and comes back with the next prompt
        (State.READY, (), 2),  # a VAE at most
        (None, (), 2),
    ],
)
def test_ranks_on_fewer_devices_than_were_chosen_stay_for_the_sake_of_a_model_alone(
    monkeypatch, state, models, used
):
    import_comfyui_here()
    vae_ranks = import_node_module("nodes.host.vae_ranks")
    running = SimpleNamespace(devices=CHOSEN[:1], state=state, models=models)
    monkeypatch.setattr(pool, "running_within", lambda devices: running if state else None)
    monkeypatch.setattr(pool, "get_sidecar", lambda devices: SimpleNamespace(devices=devices))
    sidecar, _, notes = vae_ranks.choose_ranks(StrategySettings(devices="cpu:2"))
    assert sidecar.devices == CHOSEN[:used] and bool(notes) == (used == 1)


def test_room_is_made_on_the_gpus_of_the_ranks_where_comfyui_has_something(monkeypatch):
    import_comfyui_here()
    vae_ranks = import_node_module("nodes.host.vae_ranks")
    management, freed = vae_ranks.comfy.model_management, []
    loaded = [SimpleNamespace(device=torch.device(name)) for name in ("cuda:0", "cuda:2")]
    monkeypatch.setattr(management, "current_loaded_models", loaded)
    monkeypatch.setattr(management, "free_memory", lambda size, device: freed.append((size, str(device))))
    for devices in (("cuda:1", "cuda:2"), ("cuda:0@box/one", "cuda:0@box/two"), CHOSEN):
        vae_ranks.make_room(8.0, SimpleNamespace(devices=devices))
    assert freed == [(4.0, "cuda:2")], "ComfyUI's own cuda:0 is none of theirs"


@pytest.mark.parametrize(
    ("verb", "given"),
    [("decode", (1, 4, 8, 8)), ("encode", (1, 64, 64, 3))],
)
def test_what_is_too_large_for_the_devices_is_left_to_comfyui_which_cuts_it_into_tiles(
    monkeypatch, verb, given
):
    import_comfyui_here()
    module = import_node_module("nodes.vae_nodes")

    def ends(*_, **__):
        raise OutOfMemory("Process 1 ran out of memory on cuda:1")

    sidecar = SimpleNamespace(devices=CHOSEN)
    monkeypatch.setattr(module.VaeShipment, "__init__", lambda *_, **__: None)
    monkeypatch.setattr(module.VaeShipment, "run", ends)
    monkeypatch.setattr(module, "check_splittable", lambda check, vae: None)
    monkeypatch.setattr(module, "choose_ranks", lambda settings: (sidecar, (), []))
    monkeypatch.setattr(module, "make_room", lambda *_: None)
    as_it_is = "as_sent" if verb == "decode" else "_as_network_takes"
    monkeypatch.setattr(module, as_it_is, lambda vae, tensor: tensor)
    vae = SimpleNamespace(
        latent_dim=2,
        vae_dtype=torch.float32,
        memory_used_decode=lambda *_: 0.0,
        memory_used_encode=lambda *_: 0.0,
    )
    with pytest.raises(module.CannotBeSplit, match="memory ended on the devices: Process 1 ran out"):
        getattr(module, f"_{verb}")(vae, torch.zeros(given), StrategySettings())
