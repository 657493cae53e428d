"""Groups of ranks beside each other: two device sets in one graph stay warm, and two ComfyUIs share no device."""

from __future__ import annotations

import pytest

from comfy_harness import Comfy, start_comfyui
from comfyui_client import ComfyUIClient, PromptFailed
from graphs import Graph
from parallel_backend.sidecar import device_lock

APART = ("cpu:0,cpu:1", "cpu:2,cpu:3")


def _graph(comfy, devices: tuple[str, ...], seed: int) -> dict:
    """One sampler after the other, each on its own devices."""
    graph = Graph()
    unet = comfy.write_flux("tiny_groups.safetensors")
    texts, latent = (graph.text(1), graph.text(2)), graph.latent()
    for index, names in enumerate(devices):
        loader = graph.parallel_loader(unet, names, ulysses=2)
        latent = graph.parallel_sampler(loader, *texts, latent, seed=seed + index)
    graph.save(latent, f"groups-{seed}.safetensors")
    return graph.prompt


def _pids(comfy) -> set[int]:
    return {process.pid for process in comfy.ranks()}


def test_two_device_sets_in_one_graph_stay_warm_and_another_comfyui_is_told_who_has_them(comfy, tmp_path):
    comfy.run(_graph(comfy, APART, seed=1))
    warm = _pids(comfy)
    assert len(warm) == 4
    comfy.run(_graph(comfy, APART, seed=11))
    assert _pids(comfy) == warm

    environment = {
        device_lock.VARIABLE: str(comfy.server.base_directory / "locks"),
        device_lock.CPU_TOO: "on",
        "PARALLEL_TEST_FORKED_RANKS": "1",
    }
    second = start_comfyui(tmp_path, environment=environment)
    with second:
        other = Comfy(server=second, client=ComfyUIClient(second.url))
        with pytest.raises(PromptFailed, match=rf"in use .*process {comfy.server.pid}, since"):
            other.run(_graph(other, APART[1:], seed=1))
        other.run(_graph(other, ("cpu:4,cpu:5",), seed=1))
        assert len(_pids(other)) == 2 and _pids(comfy) == warm
