"""A MODEL from its file's header: it has every parameter that ComfyUI's loaders would give it."""

import pytest
import torch

from comfy_modules import import_comfyui_here
from comfy_weight_files import write
from pack_nodes import import_node_module
from tiny_flux import write_tiny_flux


@pytest.mark.parametrize("form", ["bfloat16", "nvfp4"])
def test_with_dynamic_vram_a_model_has_its_parameters_too(tmp_path, monkeypatch, form):
    """ComfyUI makes linear layers without any then, and LoRAs would find nothing to change."""
    import_comfyui_here()
    import comfy.lora
    import comfy.memory_management

    path = str(tmp_path / "flux.safetensors")
    if form == "bfloat16":
        write_tiny_flux(path, dtype=torch.bfloat16)
    else:
        write(path, form)
    open_model = import_node_module("nodes.model.header_model").open_model

    def found():
        model = open_model(path, "diffusion_model", {}).model
        parameters = model.diffusion_model.named_parameters()
        outlines = {name: (p.dtype, tuple(p.shape), p.device.type) for name, p in parameters}
        return outlines, comfy.lora.model_lora_keys_unet(model, {})

    expected = found()
    monkeypatch.setattr(comfy.memory_management, "aimdo_enabled", True)
    assert found() == expected
    assert {device for *_, device in expected[0].values()} == {"meta"}
