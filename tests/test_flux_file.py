"""What a Flux file tells of itself, in each layout; what is refused, by which words."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file

from parallel_backend.errors import CheckpointError
from parallel_backend.flux_file import inspect_flux
from parallel_backend.flux_keys import diffusers_shapes, original_shapes
from tiny_flux import write_tiny_flux


@pytest.mark.parametrize("layout", ["bfl", "diffusers"])
@pytest.mark.parametrize("prefix", ["", "model.diffusion_model."])
@pytest.mark.parametrize("guidance", [True, False])
def test_sizes_are_read_from_the_tensors(tmp_path, layout, prefix, guidance):
    path = write_tiny_flux(
        tmp_path / "tiny.safetensors",
        heads=3,
        double_blocks=2,
        single_blocks=1,
        context_dim=48,
        pooled_dim=24,
        guidance=guidance,
        layout=layout,
        prefix=prefix,
        dtype=torch.bfloat16,
    )
    file = inspect_flux(path)
    dims = file.dims
    assert (dims.hidden, dims.heads, dims.double_blocks, dims.single_blocks) == (384, 3, 2, 1)
    assert (dims.context_dim, dims.pooled_dim, dims.guidance) == (48, 24, guidance)
    assert file.layout == {"bfl": "original", "diffusers": "diffusers"}[layout]
    assert (file.prefix, file.dtype, file.name) == (prefix, "bfloat16", "tiny.safetensors")
    assert file.tensor_bytes == sum(t.numel() * 2 for t in load_file(path).values())
    assert (file.shape.heads, file.shape.blocks) == (3, 3)


def test_the_key_map_covers_both_layouts_exactly(tmp_path):
    original = write_tiny_flux(tmp_path / "a.safetensors", double_blocks=2, single_blocks=2)
    converted = write_tiny_flux(tmp_path / "b.safetensors", double_blocks=2, single_blocks=2, layout="diffusers")
    dims = inspect_flux(original).dims
    assert original_shapes(dims) == {k: tuple(t.shape) for k, t in load_file(original).items()}
    assert diffusers_shapes(dims) == {k: tuple(t.shape) for k, t in load_file(converted).items()}


def test_a_full_checkpoint_keeps_its_other_models_to_itself(tmp_path):
    path = write_tiny_flux(tmp_path / "full.safetensors", prefix="model.diffusion_model.")
    save_file({**load_file(path), "vae.decoder.x": torch.zeros(2), "text_encoders.y": torch.zeros(2)}, path)
    assert inspect_flux(path).prefix == "model.diffusion_model."


def _changed(path, change):
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def _set(key, tensor):
    return lambda tensors: tensors.__setitem__(key, tensor)


REFUSED = {
    "a missing key": (lambda t: t.pop("single_blocks.0.linear2.bias"), "single_blocks.0.linear2.bias is missing"),
    "a missing first key": (lambda t: t.pop("double_blocks.0.img_attn.norm.key_norm.scale"), "looks like Flux.1"),
    "a wrong shape": (_set("txt_in.bias", torch.zeros(3)), r"txt_in.bias has the shape \[3\]"),
    "a scalar for a matrix": (_set("img_in.weight", torch.tensor(1.0)), "img_in.weight has the shape"),
    "an extra tensor": (_set("surprise.weight", torch.zeros(3)), "surprise.weight"),
    "a gap in the blocks": (
        lambda t: [t.__setitem__(k.replace("s.0.", "s.5."), t.pop(k)) for k in list(t) if k.startswith("single_blocks.0.")],
        "single_blocks.0",
    ),
    "scaled fp8": (_set("img_in.scale_weight", torch.ones(1)), "scaled fp8"),
    "integers": (lambda t: t.__setitem__("img_in.weight", t["img_in.weight"].to(torch.int8)), "stored as I8"),
    "Fill": (_set("img_in.weight", torch.zeros(256, 384)), "Flux Fill.*UNETLoader"),
    "Canny or Depth": (_set("img_in.weight", torch.zeros(256, 128)), "Flux Canny/Depth"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_damaged_or_foreign_flux_is_refused_by_reason(tmp_path, name):
    path = write_tiny_flux(tmp_path / "bad.safetensors")
    change, reason = REFUSED[name]
    _changed(path, change)
    with pytest.raises(CheckpointError, match=reason) as raised:
        inspect_flux(path)
    assert str(raised.value).startswith("bad.safetensors is refused")


@pytest.mark.parametrize(
    ("key", "what"),
    [
        ("input_blocks.0.0.weight", "Stable Diffusion 1, 2 or XL"),
        ("joint_blocks.0.x_block.attn.qkv.weight", "Stable Diffusion 3"),
        ("double_stream_modulation_img.lin.weight", "Flux.2"),
        ("distilled_guidance_layer.in_proj.weight", "Chroma"),
        ("lora_unet_double_blocks_0_img_attn_qkv.lora_down.weight", "LoRA"),
        ("decoder.conv_in.weight", "VAE"),
        ("text_model.encoder.layers.0.mlp.fc1.weight", "text encoder"),
        ("anything.weight", "not a Flux.1 model"),
    ],
)
def test_another_family_is_named(tmp_path, key, what):
    save_file({key: torch.zeros(2)}, tmp_path / "other.safetensors")
    with pytest.raises(CheckpointError, match=what):
        inspect_flux(tmp_path / "other.safetensors")
