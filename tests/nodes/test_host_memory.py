"""The ranks' memory as ComfyUI sees it: what lies on its own GPU counts, and while a node runs only that is freed."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch

from pack_nodes import module_fixture
from parallel_backend.planner.rules import StrategySettings
from parallel_backend.planner.workload.fit import Capacity
from parallel_backend.requests import ModelSpec
from parallel_backend.sidecar import pool
from parallel_backend.strategy import ParallelStrategy

GPU, OTHER, CPU = torch.device("cuda:0"), torch.device("cuda:1"), torch.device("cpu")
SPEC, FILE = ModelSpec("/models/flux.safetensors"), SimpleNamespace(tensor_bytes=24_000)
TWO = ParallelStrategy(ulysses_degree=2)
GIB = 2**30


class Loaded:
    """Stands in for one of ComfyUI's loaded models; `kind`: the class of its network."""

    def __init__(self, kind, device, size, used=True):
        self.model, self.device = SimpleNamespace(model=kind()), device
        self.size, self.currently_used = size, used

    def model_loaded_memory(self):
        return self.size


class TextEncoder(torch.nn.Module):
    __module__ = "comfy.text_encoders.qwen_image"


class Autoencoder(torch.nn.Module):
    def decode(self, latent):
        return latent


class ControlNet(torch.nn.Module):
    pass


def _free(seen, needed, device, keep_loaded):
    """Frees as ComfyUI does: whole models, one after the other, until `needed` bytes are free on a card of 24 GiB."""
    seen.freed.append((needed, device))
    for one in [one for one in seen.loaded if one.device == device and one not in keep_loaded]:
        if 24 * GIB - sum(other.size for other in seen.loaded if other.device == device) >= needed:
            return
        seen.loaded.remove(one)


memory = module_fixture("nodes.host.memory")
offload = module_fixture("nodes.host.offload")


@pytest.fixture
def host(memory, offload, monkeypatch):
    """nodes/host/memory.py and offload.py with a stand-in for the state of ComfyUI's memory and of the ranks."""
    seen = SimpleNamespace(node=object(), emptied=[], asked=[], loaded=[], freed=[], modules={})
    seen.memory, seen.offload, seen.flags = memory, offload, memory.args

    monkeypatch.setattr(seen.flags, "highvram", False)
    monkeypatch.setattr(seen.flags, "reserve_vram", None)
    management = memory.comfy.model_management
    monkeypatch.setattr(management, "soft_empty_cache", lambda: seen.emptied.append(1))
    monkeypatch.setattr(management, "current_loaded_models", seen.loaded)
    monkeypatch.setattr(management, "free_memory", partial(_free, seen))
    monkeypatch.setattr(memory, "get_executing_context", lambda: seen.node)
    monkeypatch.setattr(pool, "give_back", lambda spec, device: seen.asked.append(device))
    monkeypatch.setattr(pool, "put_to_sleep", lambda spec: seen.asked.append("all"))
    monkeypatch.setattr(pool, "drop_modules", lambda: seen.asked.append("modules"))
    monkeypatch.setattr(
        pool, "module_bytes", lambda device, number=None: seen.modules.get((device, number), 0)
    )
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    holding(monkeypatch)
    return seen


def holding(monkeypatch, **by_device):
    """Makes ranks run on cuda_0, cuda_1, … that hold the given bytes of SPEC."""
    held = {name.replace("_", ":"): size for name, size in by_device.items()}
    ranks = [SimpleNamespace(device=d, weight_bytes=size, working_bytes=0) for d, size in held.items()]
    group = SimpleNamespace(
        status=lambda: SimpleNamespace(ranks=ranks),
        held=SimpleNamespace(bytes_on=lambda spec, device: held.get(device, 0) if spec == SPEC else 0),
    )
    monkeypatch.setattr(pool, "all_sidecars", lambda: (group,))


def size(host, device, settings=None, plan=None):
    return host.memory.size_on(device, SPEC, FILE, settings or StrategySettings(), plan)


def test_what_ranks_hold_on_the_device_counts_and_what_lies_elsewhere_does_not(host, monkeypatch):
    holding(monkeypatch, cuda_0=6_000, cuda_1=18_000)
    assert (size(host, GPU), size(host, OTHER), size(host, CPU)) == (6_000, 18_000, 0)
    assert host.memory.held_on(GPU, SPEC) == 6_000 and host.memory.held_on(CPU, SPEC) == 0


def test_before_a_load_the_plan_tells_and_before_a_plan_the_settings(host):
    plan = SimpleNamespace(memory=SimpleNamespace(weights=5_000), devices=("cuda:1", "cuda:2"))
    assert (size(host, GPU, plan=plan), size(host, OTHER, plan=plan)) == (0, 5_000)
    assert size(host, GPU) == 24_000
    assert size(host, GPU, StrategySettings(devices="2,3")) == 0

    def manual(**degrees):
        return size(host, GPU, StrategySettings(mode="manual", strategy=TWO.replace(**degrees)))

    assert manual() == 24_000 and manual(shard_weights=True) == 12_000
    assert manual(tensor_degree=2, shard_weights=False) == 12_000
    assert manual(shard_weights=True, offload_weights=True) == 0
    assert host.memory.held_on(GPU, SPEC) == 0


@pytest.mark.parametrize(
    ("node", "device", "given"),
    [(object(), GPU, "cuda:0"), (None, GPU, "all"), (object(), CPU, "all")],
    ids=["a node gets that of ComfyUI's own GPU", "a person between prompts gets all", "on the CPU"],
)
def test_who_asks_for_memory_gets_it_but_under_highvram(host, node, device, given):
    host.node = node
    assert host.memory.make_room(SPEC, device) and host.asked == ["modules", given]
    host.flags.highvram = True
    assert not host.memory.make_room(SPEC, device) and not host.memory.drop_modules()
    assert host.asked == ["modules", given]


def test_comfyui_gives_its_cache_back_before_ranks_load_and_not_while_they_hold_the_model(host, monkeypatch):
    host.memory.give_cache_back(GPU, SPEC)
    assert len(host.emptied) == 1
    host.memory.give_cache_back(CPU, SPEC)
    holding(monkeypatch, cuda_0=6_000)
    host.memory.give_cache_back(GPU, SPEC)
    assert len(host.emptied) == 1


def notes_of(host, gib, *devices):
    """Makes room for a plan whose ranks each take so many GiB at their peak; returns the notes."""
    strategy, memory = ParallelStrategy(ulysses_degree=len(devices)), SimpleNamespace(private_bytes=gib * GIB)
    plan = SimpleNamespace(devices=devices, memory=memory, strategy=strategy)
    return host.offload.offload_comfyui_models(plan)


def test_a_text_encoder_on_any_card_of_the_ranks_makes_room_before_they_run(host):
    """ComfyUI would load no model on the second card, so by itself it would free no memory there."""
    encoder, vae = Loaded(TextEncoder, OTHER, 9 * GIB), Loaded(Autoencoder, OTHER, GIB)
    control = Loaded(ControlNet, OTHER, 2 * GIB)
    host.loaded += [encoder, vae, control]
    notes = notes_of(host, 20, "cuda:0", "cuda:1")
    assert notes == ("TextEncoder made room on cuda:1: 9.00 GiB of it went to host memory",)
    assert host.loaded == [vae, control] and host.freed == [(20 * GIB, OTHER)]


@pytest.fixture
def encoder(host):
    """A text encoder of 9 GiB that ComfyUI has on its GPU."""
    host.loaded.append(Loaded(TextEncoder, GPU, 9 * GIB))
    return host.loaded[0]


def test_nothing_moves_where_there_is_room_or_the_ranks_hold_it_already(host, encoder, monkeypatch):
    assert notes_of(host, 12, "cuda:0") == ()
    assert notes_of(host, 20, "cuda:0@box/one", "cuda:0@box/two") == (), "the GPUs of another machine"
    holding(monkeypatch, cuda_0=20 * GIB)
    assert notes_of(host, 20, "cuda:0") == ()
    assert notes_of(host, 20, "cpu:0", "cpu:1") == ()
    assert host.loaded == [encoder]


def test_text_encoders_and_vaes_of_the_ranks_go_where_the_plan_has_no_room_beside_them(host, monkeypatch):
    holding(monkeypatch, cuda_0=5 * GIB)
    others = {"cuda:0": 0, "cuda:1": 3 * GIB}
    monkeypatch.setattr(
        Capacity, "of", staticmethod(lambda d: Capacity((24 * GIB,) * len(d), tuple(map(others.get, d))))
    )
    host.modules[("cuda:1", None)] = 5 * GIB
    assert notes_of(host, 16, "cuda:0", "cuda:1") == () and host.asked == []
    assert notes_of(host, 17, "cuda:0") == ()  # the ranks have none there
    (note,) = notes_of(host, 17, "cuda:0", "cuda:1")
    assert note.startswith("text encoders and VAEs made room on cuda:1: 5.00 GiB of them left it in ")
    assert host.asked == ["modules"]


def test_a_text_encoder_of_the_ranks_counts_on_comfyuis_device_and_no_other(host):
    host.modules |= {("cuda:0", 7): 6_000, ("cuda:1", 8): 1}
    assert host.memory.modules_on(GPU, 7) == 6_000
    assert host.memory.modules_on(CPU, 7) == host.memory.modules_on(OTHER, 7) == 0


def test_the_cache_of_this_process_goes_where_ranks_lack_room_and_nothing_can_move(host, monkeypatch):
    """The plan counts this cache as free memory for the ranks."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    holding(monkeypatch, cuda_0=12 * GIB)
    assert notes_of(host, 12, "cuda:0") == () and len(host.emptied) == 0
    assert notes_of(host, 20, "cuda:0") == () and len(host.emptied) == 1


def test_what_comfyui_uses_while_it_samples_stays_and_counts_and_so_do_the_ranks_own(host, monkeypatch):
    ours = Loaded(ControlNet, GPU, 8 * GIB, used=False)
    network = torch.nn.Module()
    ours.model.model.diffusion_model = network
    host.memory._networks[network] = SimpleNamespace()
    used, left = Loaded(ControlNet, GPU, 2 * GIB), Loaded(ControlNet, GPU, 3 * GIB, used=False)
    host.loaded += [ours, used, left, Loaded(TextEncoder, GPU, 9 * GIB)]
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 16 * GIB)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 14 * GIB)
    assert host.offload.memory_in_use.FREEABLE[-1]("cuda:0") == (2 + 3 + 9) * GIB
    assert len(notes_of(host, 23, "cuda:0")) == 2
    assert host.loaded == [ours, used]


def test_what_comfyui_was_told_to_reserve_stays_free_and_is_none_of_the_ranks(host, encoder, monkeypatch):
    assert notes_of(host, 14, "cuda:0") == ()
    host.flags.reserve_vram = 1.5
    assert len(notes_of(host, 14, "cuda:0")) == 1
    assert host.freed[-1] == (15.5 * GIB, GPU)
    can_free = host.offload.memory_in_use.FREEABLE[-1]
    assert can_free("cuda:0") == -1.5 * GIB
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 3 * GIB)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: GIB)
    assert can_free("cuda:0") == 0.5 * GIB


def test_what_comfyui_takes_from_the_ranks_is_told_once(host, monkeypatch):
    holding(monkeypatch, cuda_0=6 * GIB)
    host.memory.make_room(SPEC, GPU)
    (note,) = host.memory.eviction_notes()
    assert "took the room of flux.safetensors on cuda:0" in note and "6.00 GiB" in note
    assert host.memory.eviction_notes() == []
