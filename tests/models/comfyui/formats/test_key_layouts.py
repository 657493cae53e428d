"""Prefixes of keys are removed, and weights stored in several parts are joined only at their destination."""

from contextlib import nullcontext

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from comfy_modules import CPU, import_comfyui_here
from comfy_weight_files import spec
from mapped_files import is_mapped
from parallel_backend.engine.comm.groups import Axis
from parallel_backend.engine.sharding import ByteSharding
from parallel_backend.models.base import ModelPart
from parallel_backend.models.comfyui.formats.key_layouts import Joined, from_diffusers, without_prefix
from parallel_backend.models.comfyui.load import load
from tiny_flux import write_tiny_flux

FUSED = ("double_blocks.0.img_attn.qkv.weight", "single_blocks.1.linear1.weight")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_parts_stay_where_they_are_until_something_is_computed(dtype):
    parts = [torch.randn(rows, 3).to(dtype) for rows in (2, 1, 4)]
    wanted = torch.cat([part.float() for part in parts])
    parameter = nn.Parameter(Joined(parts), requires_grad=False)
    assert (parameter.shape, parameter.dtype, parameter.nbytes) == (wanted.shape, dtype, 21 * dtype.itemsize)
    assert [piece.data_ptr() for piece in parameter.pieces] == [part.data_ptr() for part in parts]
    assert torch.equal(parameter.float(), wanted)
    assert torch.equal(parameter[1:3].float(), wanted[1:3])
    moved = []
    assert torch.equal(parameter.on(CPU, lambda piece: moved.append(piece) or piece).float(), wanted)
    assert len(moved) == 3


@pytest.fixture
def files(tmp_path):
    sizes = {"dtype": torch.bfloat16, "single_blocks": 2}
    return (
        write_tiny_flux(tmp_path / "original.safetensors", **sizes),
        write_tiny_flux(tmp_path / "diffusers.safetensors", layout="diffusers", **sizes),
    )


@pytest.mark.parametrize("lost", ["single_transformer_blocks.0.attn.to_k.weight", "x_embedder.weight"])
def test_a_file_whose_parts_do_not_fit_together_is_left_to_comfyui(files, lost):
    tensors = load_file(files[1])
    del tensors[lost]
    import_comfyui_here()
    assert from_diffusers(tensors) is None
    assert from_diffusers(load_file(files[0])) is None


def _answer(model):
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(*shape, generator=generator)

    prompt = {"context": draw(1, 5, 64), "y": draw(1, 32), "guidance": torch.tensor([3.5])}
    sharding = model.byte_sharding
    with torch.inference_mode(), nullcontext() if sharding is None else sharding.call():
        return model.module(draw(1, 16, 8, 6), torch.tensor([0.5]), **prompt, transformer_options={})


@pytest.mark.parametrize("is_shared_out", [False, True])
def test_what_a_model_keeps_of_the_file_are_views_of_it(files, is_shared_out):
    """The views serve to remove LoRAs. Whole or sharded, the model answers as from the original layout."""
    answers = []
    for path in files:
        sharding = ByteSharding(Axis((0,), 0, None), CPU, offload=False)
        model = load(spec(path), CPU, ModelPart(byte_sharding=sharding) if is_shared_out else None)
        answers.append(_answer(model))
    assert torch.equal(*answers)
    for name in FUSED:
        pieces = model.originals[f"diffusion_model.{name}"].pieces
        assert all(is_mapped(files[1], piece) for piece in pieces)


@pytest.mark.parametrize(
    ("keys", "metadata"),
    [
        (("a", "b"), {}),
        (("transformer.layers.0", "to_cond_embed.0"), {}),  # part of Stable Audio's own names
        (("model.diffusion_model.a",), {}),  # ComfyUI knows this prefix
        (("vae.a",), {}),
        (("transformer.a",), {"_quantization_metadata": "{}"}),  # it names layers by the keys with the prefix
    ],
)
def test_other_files_stay_as_they_are(keys, metadata):
    tensors = dict.fromkeys(keys, 1)
    assert without_prefix(tensors, metadata) == tensors
