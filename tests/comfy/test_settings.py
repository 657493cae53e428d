"""The pack's entries in ComfyUI's Settings are set in the page, stored by ComfyUI, and apply from the next use."""

from __future__ import annotations

import pytest

from comfyui_client import PromptFailed
from graphs import Graph
from pack_nodes import import_node_module
from tiny_vae import FLUX, write_vae
from waiting import wait_until

VAE = "tiny_settings.safetensors"
DEFAULTS = import_node_module("nodes.host.settings").DEFAULTS


def _decode(comfy, draw: int) -> None:
    """Decodes on the default devices, because the prompt has no Strategy Selector."""
    graph = Graph()
    vae = [graph.add("VAELoader", vae_name=VAE), 0]
    image = [graph.add("ParallelVAEDecode", samples=graph.latent(draw=draw), vae=vae), 0]
    graph.save(image, "settings.safetensors")
    comfy.run(graph.prompt)


def test_settings_count_from_the_next_use_on(measuring, page, set_setting):
    write_vae(measuring.models("vae") / VAE, FLUX)
    shown = page.evaluate("() => app.extensionManager.setting.settings")
    for name, default in DEFAULTS.items():
        assert shown[f"parallel_sampling.{name}"]["defaultValue"] == default, name

    measuring.stop_ranks()
    set_setting("parallel_sampling.default_devices", "cpu:2")
    _decode(measuring, draw=1)
    running = [group["devices"] for group in measuring.groups() if group["state"] == "ready"]
    assert running == [["cpu:0", "cpu:1"]]

    set_setting("parallel_sampling.allow_approximate", False)
    graph = Graph()
    unet = measuring.write_flux("tiny_settings.safetensors", single_blocks=2)
    loader = graph.parallel_loader(unet, "cpu:2", pipefusion=2, warmup_steps=1)
    latent = graph.parallel_sampler(loader, *graph.request())
    with pytest.raises(PromptFailed, match="Allow approximate strategies"):
        measuring.sample(graph.prompt, latent)

    set_setting("parallel_sampling.sleep_after_minutes", 0.02)
    _decode(measuring, draw=2)  # its end starts the timer
    wait_until(lambda: "asleep" in {group["state"] for group in measuring.groups()})
