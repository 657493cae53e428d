"""A MODEL from its file's header: it has every parameter that ComfyUI's loaders would give it, and no memory."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from comfy_weight_files import write
from pack_nodes import module_fixture
from parallel_backend.errors import CheckpointError
from parallel_backend.requests import ComfyUISource, ModelSpec
from tiny_flux import write_tiny_flux

header_model = module_fixture("nodes.model.header_model")


def file_of(path):
    return ModelSpec(str(path), "comfyui", comfyui=ComfyUISource(root=""))


def outlines(model):
    parameters = model.diffusion_model.named_parameters()
    return {name: (p.dtype, tuple(p.shape), p.device.type) for name, p in parameters}


@pytest.mark.parametrize("form", ["bf16", "nvfp4"])
def test_with_dynamic_vram_a_model_has_its_parameters_too(header_model, tmp_path, monkeypatch, form):
    """With dynamic VRAM ComfyUI makes linear layers without parameters, and LoRAs would find nothing to change."""
    import comfy.lora
    import comfy.memory_management

    path = str(tmp_path / "flux.safetensors")
    write(path, form)

    def found():
        model = header_model.open_model(file_of(path)).model
        return outlines(model), comfy.lora.model_lora_keys_unet(model, {})

    expected = found()
    monkeypatch.setattr(comfy.memory_management, "aimdo_enabled", True)
    assert found() == expected
    assert {device for *_, device in expected[0].values()} == {"meta"}


PREFIXES = ("transformer.", "diffusion_model.", "model.diffusion_model.")


@pytest.mark.parametrize(
    ("layout", "prefix", "dtype"),
    [
        *(("bfl", prefix, torch.bfloat16) for prefix in PREFIXES),
        *(("diffusers", prefix, torch.bfloat16) for prefix in ("", *PREFIXES)),
        ("diffusers", "", torch.float32),
        ("diffusers", "", torch.float8_e4m3fn),
    ],
)
def test_every_spelling_of_flux_gives_the_same_outlines(header_model, tmp_path, layout, prefix, dtype):
    """The oracle is the model of a file in the original key layout, without a prefix and in the same dtype."""
    sizes = {"single_blocks": 2, "dtype": dtype}
    original = write_tiny_flux(tmp_path / "original.safetensors", **sizes)
    file = write_tiny_flux(tmp_path / "flux.safetensors", layout=layout, prefix=prefix, **sizes)

    def found(path):
        model = header_model.open_model(file_of(path)).model
        return type(model), outlines(model), model.get_dtype(), model.manual_cast_dtype

    assert found(file) == found(original)


def test_scaled_weights_in_diffusers_layout_are_refused_by_name(header_model, tmp_path):
    file = write_tiny_flux(tmp_path / "scaled.safetensors", layout="diffusers", dtype=torch.float8_e4m3fn)
    tensors = load_file(file) | {"transformer_blocks.0.attn.to_q.weight_scale": torch.ones(())}
    save_file(tensors, file)
    with pytest.raises(CheckpointError, match=r"scaled\.safetensors is refused: .* in diffusers' key layout"):
        header_model.open_model(file_of(file))


def test_ace_step_computes_its_codebook_and_has_no_weights(header_model):
    """ACE-Step reads values of tensors while it is built; tensors on the meta device have none."""
    import comfy.model_base
    import comfy.supported_models

    config = comfy.supported_models.ACEStep15({"audio_model": "ace1.5"})
    with pytest.raises(RuntimeError):
        comfy.model_base.ACEStep15(config, device=torch.device("meta"))
    base = header_model.build_on_meta(lambda device: comfy.model_base.ACEStep15(config, device=device))
    assert {parameter.device.type for parameter in base.diffusion_model.parameters()} == {"meta"}
    assert sum(parameter.numel() for parameter in base.diffusion_model.parameters()) > 1e9


def test_a_class_that_cannot_be_built_says_why(header_model):
    def build(device):
        raise RuntimeError("no such attention")

    with pytest.raises(RuntimeError, match="no such attention"):
        header_model.build_on_meta(build)
