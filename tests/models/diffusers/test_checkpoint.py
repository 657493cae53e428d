"""A Flux.1 file is described from its header alone; other files are refused with name, reason and remedy."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import pytest

from parallel_backend.errors import CheckpointError
from parallel_backend.models.diffusers.checkpoint import PREFIXES, check_is_flux, inspect_flux
from parallel_backend.models.diffusers.keys import FluxDims, diffusers_shapes, original_shapes
from parallel_backend.strategy import ModelShape
from sparse_checkpoint import write_sparse
from tiny_flux import tiny_flux_tensors, to_diffusers_layout, write_tiny_flux

SIZES = {"heads": 1, "double_blocks": 2, "single_blocks": 3, "context_dim": 24, "pooled_dim": 40}
PREFIX = "model.diffusion_model."
_TENSORS = tiny_flux_tensors(**SIZES)
ORIGINAL = {key: tuple(tensor.shape) for key, tensor in _TENSORS.items()}
DIFFUSERS = {key: tuple(tensor.shape) for key, tensor in to_diffusers_layout(_TENSORS).items()}
SHAPES = {"original": ORIGINAL, "diffusers": DIFFUSERS}
BYTES = sum(map(prod, ORIGINAL.values()))  # in fp8
del _TENSORS


DIMS = FluxDims(128, 1, 128, 512, 2, 3, 24, 40, 64, 64, guidance=True)


def written(folder, shapes, dtype="BF16", others=None):
    return write_sparse(folder / "x.safetensors", shapes, dtype, others)


def refusal(folder, *file) -> str:
    """Returns the message with which this file is refused, and checks its form."""
    with pytest.raises(CheckpointError) as refused:
        inspect_flux(written(folder, *file))
    message = str(refused.value)
    assert message.startswith("x.safetensors is refused: ")
    assert message.endswith(".")
    assert str(folder) not in message
    assert len(message) < 600
    return message


@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize("layout", ["original", "diffusers"])
def test_sizes_come_from_the_tensors_in_either_layout_under_any_prefix(tmp_path, layout, prefix):
    file = inspect_flux(written(tmp_path, {prefix + key: shape for key, shape in SHAPES[layout].items()}))
    assert (file.layout, file.prefix, file.dims) == (layout, prefix, DIMS)
    assert (file.name, file.dtype, file.tensor_bytes) == ("x.safetensors", "bfloat16", 2 * BYTES)
    assert file.shape == ModelShape(1, 5, "x.safetensors", sends_tokens=True)


@pytest.mark.parametrize("layout", ["bfl", "diffusers"])
def test_a_file_without_guidance_embedding_is_a_schnell(tmp_path, layout):
    path = write_tiny_flux(tmp_path / "x.safetensors", layout=layout, guidance=False, **SIZES)
    assert inspect_flux(path).dims == replace(DIMS, guidance=False)


def test_the_real_flux_dev_is_told_from_its_header(tmp_path):
    real = FluxDims(3072, 24, 128, 12288, 19, 38, 4096, 768, 64, 64, guidance=True)
    for layout, shapes in (("original", original_shapes(real)), ("diffusers", diffusers_shapes(real))):
        file = inspect_flux(written(tmp_path, shapes))
        assert (file.layout, file.dims) == (layout, real)
        assert file.tensor_bytes == 2 * 11_901_408_320  # parameters of FLUX.1-dev by its model card


@pytest.mark.parametrize(
    ("dtype", "name"),
    [("BF16", "bfloat16"), ("F16", "float16"), ("F32", "float32"), ("F8_E4M3", "float8_e4m3fn")],
)
def test_the_dtype_is_that_of_most_bytes(tmp_path, dtype, name):
    norms = {key: "F32" for key in ORIGINAL if key.endswith((".bias", ".scale"))}
    assert inspect_flux(written(tmp_path, ORIGINAL, dtype, norms)).dtype == name


@pytest.mark.parametrize("prefix", ["", PREFIX])
def test_a_full_checkpoint_is_read_past_its_vae_and_text_encoders(tmp_path, prefix):
    position = "text_encoders.clip_l.transformer.text_model.embeddings.position_ids"
    beside = {
        "vae.decoder.conv_in.weight": (8, 8),
        "text_encoders.t5xxl.transformer.encoder.block.0.layer.0.SelfAttention.q.weight": (8, 8),
        position: (7,),
        "text_encoders.t5xxl.scaled_fp8": (0,),
    }
    shapes = {prefix + key: shape for key, shape in ORIGINAL.items()} | beside
    file = inspect_flux(written(tmp_path, shapes, "F8_E4M3", {position: "U8"}))
    assert (file.prefix, file.dims, file.tensor_bytes) == (prefix, DIMS, BYTES)


@pytest.mark.parametrize(
    ("layout", "key"), [(layout, key) for layout, shapes in SHAPES.items() for key in shapes]
)
def test_a_missing_key_is_named(tmp_path, layout, key):
    left = {PREFIX + name: shape for name, shape in SHAPES[layout].items() if name != key}
    message = refusal(tmp_path, left)
    assert key in message or "guidance" in key
    assert "missing" in message or "has no" in message or "guidance" in message


@pytest.mark.parametrize("layout", ["original", "diffusers"])
@pytest.mark.parametrize("damage", ["transposed", "one row more", "flat", "empty"])
def test_a_wrong_shape_is_refused(tmp_path, layout, damage):
    for key, shape in SHAPES[layout].items():
        if len(shape) == 2 and shape[0] != shape[1]:
            rows, columns = shape
            wrong = {"transposed": (columns, rows), "one row more": (rows + 1, columns)}.get(
                damage, (rows * columns,) if damage == "flat" else (rows, 0)
            )
            # The tensor that is named depends on the tensors from which the sizes are read.
            refusal(tmp_path, {**SHAPES[layout], key: wrong}, "F8_E4M3")


SCALED = {"single_blocks.0.linear1.scale_weight": (1,)}
EXTRA = {"double_blocks.0.img_attn.extra": (1,)}


@pytest.mark.parametrize(
    ("shapes", "words"),
    [
        ({k: s for k, s in ORIGINAL.items() if not k.startswith("single_blocks.1.")}, ["single_blocks.1."]),
        (ORIGINAL | EXTRA, [*EXTRA]),
        ({k: (64,) if k.endswith(".scale") else s for k, s in ORIGINAL.items()}, ["heads have 64 channels"]),
        *(
            ({**ORIGINAL, key: (1,)}, [key, "plain fp8_e4m3fn"])
            for key in ("scaled_fp8", *SCALED, "img_in.weight_scale")
        ),
    ],
    ids=[
        "a block is left out of the middle",
        "a key too many",
        "narrow heads",
        "scaled",
        "a scale",
        "scales",
    ],
)
def test_keys_and_shapes_that_flux_lacks_are_refused_by_name(tmp_path, shapes, words):
    message = refusal(tmp_path, shapes, "F8_E4M3")
    assert all(word in message for word in words)


def test_hostile_keys_do_not_reach_the_message_raw(tmp_path):
    hostile = {"\x1b[2J" + "x" * 100_000: (1,), "\ud800": (1,), "y" * 100_000: (1,)}
    message = refusal(tmp_path, {**ORIGINAL, **hostile})
    assert message.isprintable()


OTHERS = {
    "Flux.2": {**ORIGINAL, "double_stream_modulation_img.lin.weight": (6, 1)},
    "Flux.2 ": {"double_stream_modulation_img.linear.weight": (6, 1), "x_embedder.weight": (1, 1)},
    "Chroma": {**ORIGINAL, "distilled_guidance_layer.in_proj.weight": (1, 1)},
    "ControlNet": {**DIFFUSERS, "controlnet_x_embedder.weight": (1, 1)},
    "LoRA": {"lora_unet_double_blocks_0_img_attn_qkv.lora_down.weight": (1, 1)},
    "LoRA ": {"transformer.single_transformer_blocks.0.proj_mlp.lora_A.weight": (1, 1)},
    "HunyuanVideo": {"txt_in.individual_token_refiner.blocks.0.norm1.weight": (1,)},
    "Qwen-Image": {"transformer_blocks.0.img_mod.1.weight": (1, 1), "img_in.weight": (1, 1)},
    "Stable Diffusion 3": {PREFIX + "joint_blocks.0.context_block.attn.qkv.weight": (1, 1)},
    "Stable Diffusion 1, 2 or XL": {PREFIX + "input_blocks.0.0.weight": (320, 4, 3, 3)},
    "diffusers UNet": {"down_blocks.0.resnets.0.conv1.weight": (1, 1)},
    "VAE": {"decoder.conv_in.weight": (1, 1)},
    "text encoder": {"encoder.block.0.layer.0.SelfAttention.q.weight": (1, 1)},
    "text encoder ": {"text_model.embeddings.token_embedding.weight": (1, 1)},
    "not a Flux.1 model": {"weight": (1, 1)},
}


@pytest.mark.parametrize("what", OTHERS)
def test_another_kind_of_file_is_called_by_its_name(tmp_path, what):
    message = refusal(tmp_path, OTHERS[what])
    assert what.strip() in message
    assert "choose a Flux.1 checkpoint" in message


@pytest.mark.parametrize("layout", ["original", "diffusers"])
def test_fill_canny_and_depth_take_in_more_channels(tmp_path, layout):
    entrance = "img_in.weight" if layout == "original" else "x_embedder.weight"
    for channels in (128, 384):
        dims = inspect_flux(written(tmp_path, {**SHAPES[layout], entrance: (128, channels)})).dims
        assert (dims.in_channels, dims.out_channels) == (channels, 64)
    message = refusal(tmp_path, {**SHAPES[layout], entrance: (128, 96)})
    assert "96 input and 64 output channels" in message
    assert "UNETLoader" in message


@pytest.mark.parametrize("dtype", ["I8", "U8", "F8_E5M2"])
def test_a_quantised_file_is_refused_by_its_dtype(tmp_path, dtype):
    message = refusal(tmp_path, ORIGINAL, "BF16", {"single_blocks.0.linear1.weight": dtype})
    assert f"single_blocks.0.linear1.weight is stored as {dtype}" in message
    assert "bfloat16" in message


@pytest.mark.parametrize(
    ("shapes", "dtype"),
    [({**ORIGINAL, **SCALED}, "F8_E4M3"), (ORIGINAL, "F8_E5M2"), (ORIGINAL, "BF16")],
    ids=["scaled", "fp8_e5m2", "plain"],
)
def test_comfyuis_modules_take_flux_in_further_formats(tmp_path, shapes, dtype):
    check_is_flux(written(tmp_path, shapes, dtype))
    missing = {key: shape for key, shape in shapes.items() if not key.startswith("double_blocks.0.img_attn")}
    with pytest.raises(CheckpointError, match=r"looks like Flux\.1 but has no double_blocks"):
        check_is_flux(written(tmp_path, missing, dtype))
    with pytest.raises(CheckpointError, match="it is a Chroma model"):
        other = {**shapes, "distilled_guidance_layer.in_proj.weight": (8, 8)}
        check_is_flux(written(tmp_path, other, dtype))


def test_a_plain_file_with_a_missing_key_is_refused_beside_a_scaled_text_encoder(tmp_path):
    shapes = {key: shape for key, shape in ORIGINAL.items() if key != "txt_in.weight"}
    shapes |= {"text_encoders.t5xxl.scaled_fp8": (0,)}
    with pytest.raises(CheckpointError, match=r"txt_in\.weight"):
        check_is_flux(written(tmp_path, shapes))
