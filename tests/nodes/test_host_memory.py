"""The ranks' memory in ComfyUI's eyes: what lies on its own GPU counts, and that alone goes while a node runs."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from pack_nodes import import_node_module
from parallel_backend.planner import decide  # noqa: F401  the module under test must meet these very ones
from parallel_backend.planner.rules import StrategySettings
from parallel_backend.requests import ModelSpec
from parallel_backend.sidecar import pool
from parallel_backend.strategy import ParallelStrategy

GPU, OTHER, CPU = torch.device("cuda:0"), torch.device("cuda:1"), torch.device("cpu")
SPEC, FILE = ModelSpec("/models/flux.safetensors"), SimpleNamespace(tensor_bytes=24_000)
TWO = ParallelStrategy(ulysses_degree=2)


@pytest.fixture
def host(monkeypatch):
    """nodes/host/memory.py beside a ComfyUI of which it sees four names."""
    seen = SimpleNamespace(node=object(), emptied=0, asked=[])
    flags = SimpleNamespace(highvram=False, gpu_only=False, novram=False, lowvram=False)

    def soft_empty_cache():
        seen.emptied += 1

    made = {
        "comfy": {},
        "comfy.cli_args": {"args": flags},
        "comfy.model_management": {"soft_empty_cache": soft_empty_cache},
        "comfy_execution": {},
        "comfy_execution.utils": {"get_executing_context": lambda: seen.node},
    }
    for name, names in made.items():
        module = ModuleType(name)
        module.__dict__.update(names)
        monkeypatch.setitem(sys.modules, name, module)
    sys.modules["comfy"].model_management = sys.modules["comfy.model_management"]
    monkeypatch.delitem(sys.modules, "pack_of_nodes.nodes.host.memory", raising=False)
    seen.memory, seen.flags = import_node_module("nodes.host.memory"), flags
    monkeypatch.setattr(pool, "give_back", lambda spec, device: seen.asked.append(device))
    monkeypatch.setattr(pool, "put_to_sleep", lambda spec: seen.asked.append("all"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    yield seen
    sys.modules.pop("pack_of_nodes.nodes.host.memory", None)


def holding(monkeypatch, **by_device):
    """Ranks hold so many bytes on cuda_0, cuda_1, …"""
    found = {name.replace("_", ":"): size for name, size in by_device.items()}
    group = SimpleNamespace(bytes_on=lambda spec, device: found.get(device, 0) if spec == SPEC else 0)
    monkeypatch.setattr(pool, "all_sidecars", lambda: (group,))


def size(host, device, settings=None, plan=None):
    return host.memory.size_on(device, SPEC, FILE, settings or StrategySettings(), plan)


def test_what_ranks_hold_on_the_device_counts_and_what_lies_elsewhere_does_not(host, monkeypatch):
    holding(monkeypatch, cuda_0=6_000, cuda_1=18_000)
    assert (size(host, GPU), size(host, OTHER), size(host, CPU)) == (6_000, 18_000, 0)
    assert host.memory.held_on(GPU, SPEC) == 6_000 and host.memory.held_on(CPU, SPEC) == 0


def test_before_a_load_the_plan_tells_and_before_a_plan_the_settings(host, monkeypatch):
    holding(monkeypatch)
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


def test_a_node_that_needs_memory_gets_that_of_comfyuis_own_gpu_alone(host):
    assert host.memory.make_room(SPEC, GPU) and host.asked == ["cuda:0"]


def test_a_person_who_unloads_models_between_prompts_gets_all(host):
    host.node = None
    assert host.memory.make_room(SPEC, GPU) and host.asked == ["all"]


def test_on_the_cpu_and_under_highvram_it_is_as_before(host):
    assert host.memory.make_room(SPEC, CPU) and host.asked == ["all"]
    host.flags.highvram = True
    assert not host.memory.make_room(SPEC, GPU) and host.asked == ["all"]


def test_comfyui_gives_its_cache_back_before_ranks_load_and_not_while_they_hold_the_model(host, monkeypatch):
    holding(monkeypatch)
    host.memory.give_cache_back(GPU, SPEC)
    assert host.emptied == 1
    host.memory.give_cache_back(CPU, SPEC)
    holding(monkeypatch, cuda_0=6_000)
    host.memory.give_cache_back(GPU, SPEC)
    assert host.emptied == 1
