"""A Flux.1 file of any layout and dtype becomes the same network, over the mapped file."""

from __future__ import annotations

import shutil
import sys
from functools import cache
from itertools import count
from pathlib import Path

import pytest
import torch
from diffusers.models.transformers.transformer_flux import FluxTransformer2DModel
from safetensors.torch import load_file, save_file

from mapped_files import is_mapped
from parallel_backend.errors import CheckpointError, RequestError
from parallel_backend.models.diffusers.adapter import image_ids, pack, unpack
from parallel_backend.models.diffusers.casting import CastingLinear
from parallel_backend.models.diffusers.checkpoint import inspect_flux
from parallel_backend.models.diffusers.keys import diffusers_sources
from parallel_backend.models.diffusers.load import DiffusersModel, load
from parallel_backend.requests import ModelSpec
from tiny_flux import tiny_flux_config, tiny_flux_tensors, to_diffusers_layout, write_tiny_flux

SIZES = {"heads": 2, "double_blocks": 2, "single_blocks": 2, "context_dim": 48, "pooled_dim": 24}
PREFIX = "model.diffusion_model."
CPU = torch.device("cpu")
META = torch.device("meta")  # stands for an accelerator where only dtypes matter
HEIGHT, WIDTH, TEXT = 6, 10, 5  # the latent's height and width, and tokens of text

F32, F16, BF16, FP8 = torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A function that writes a file of SIZES; the same file for the same options, which no test may change."""
    folder, numbers = tmp_path_factory.mktemp("flux"), count()
    return cache(
        lambda **options: write_tiny_flux(folder / f"{next(numbers)}.safetensors", **options, **SIZES)
    )


def inputs(seed: int = 0) -> dict[str, torch.Tensor]:
    """Returns the inputs of a model call with two rows."""
    g = torch.Generator().manual_seed(seed)
    return {
        "x": torch.randn(2, 16, HEIGHT, WIDTH, generator=g),
        "context": torch.randn(2, TEXT, SIZES["context_dim"], generator=g),
        "pooled": torch.randn(2, SIZES["pooled_dim"], generator=g),
        "sigma": torch.tensor([0.8123, 0.3331]),
        "guidance": torch.tensor([4.0, 2.0]),  # 1000 times these is exact in bf16: only arithmetic rounds
    }


def loaded(path: Path, weight_dtype: str = "auto", device: torch.device = CPU) -> DiffusersModel:
    return load(ModelSpec(str(path), weight_dtype=weight_dtype), device)


@cache
@torch.no_grad()
def judged(stored: torch.dtype, *, guidance: bool = True) -> torch.Tensor:
    """Returns diffusers' own answer in float32, with weights rounded to `stored` and loaded in diffusers' layout."""
    tensors = to_diffusers_layout(tiny_flux_tensors(guidance=guidance, **SIZES))
    model = FluxTransformer2DModel(**tiny_flux_config(guidance=guidance, **SIZES)).eval()
    model.load_state_dict({key: t.to(stored).float() for key, t in tensors.items()})
    given = inputs()
    tokens = model(
        hidden_states=pack(given["x"]),
        encoder_hidden_states=given["context"],
        pooled_projections=given["pooled"],
        timestep=given["sigma"],
        guidance=given["guidance"] if guidance else None,
        img_ids=image_ids(HEIGHT, WIDTH),
        txt_ids=torch.zeros(TEXT, 3),
        return_dict=False,
    )[0]
    return unpack(tokens, HEIGHT, WIDTH)


@torch.no_grad()
def velocity(model: DiffusersModel, **changes) -> torch.Tensor:
    given = {**inputs(), **changes}
    answer = model.module(
        given["x"], given["sigma"], given["context"], given["pooled"], guidance=given["guidance"]
    )
    return answer.float()


def error(result: torch.Tensor, expected: torch.Tensor) -> float:
    """Returns the largest difference, relative to the largest value of `expected`."""
    assert result.shape == expected.shape
    assert result.dtype == F32
    return ((result - expected).abs().max() / expected.abs().max()).item()


@pytest.mark.parametrize(
    ("dtype", "layout", "prefix", "guidance"),
    [  # every pair of two of them
        (F32, "bfl", "", True),
        (F32, "diffusers", PREFIX, False),
        (F16, "bfl", PREFIX, True),
        (F16, "diffusers", "", False),
        (BF16, "bfl", PREFIX, False),
        (BF16, "diffusers", "", True),
    ],
)
def test_every_layout_and_dtype_gives_diffusers_forward(written, dtype, layout, prefix, guidance):
    path = written(dtype=dtype, layout=layout, prefix=prefix, guidance=guidance)
    model = loaded(path)
    assert model.compute_dtype == F32
    assert error(velocity(model), judged(dtype, guidance=guidance)) < 1e-5


def test_a_different_network_is_told_apart(written):
    """The negative control: the comparisons above can fail."""
    other = loaded(written(seed=1))
    assert error(velocity(other), judged(F32)) > 0.1


def test_files_that_comfyui_saved_load_too(written, tmp_path):
    path = written(prefix=PREFIX)
    saved = {key.replace("_norm.scale", "_norm.weight"): tensor for key, tensor in load_file(path).items()}
    save_file(saved, tmp_path / "saved.safetensors")
    assert torch.equal(velocity(loaded(tmp_path / "saved.safetensors")), velocity(loaded(path)))


@pytest.mark.parametrize("padding", [1, 2])
def test_a_file_whose_data_lie_at_an_odd_offset_loads(written, tmp_path, padding):
    path = written()
    content = path.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    odd = tmp_path / "odd.safetensors"
    odd.write_bytes(
        (end - 8 + padding).to_bytes(8, "little") + content[8:end] + b" " * padding + content[end:]
    )
    assert torch.equal(velocity(loaded(odd)), velocity(loaded(path)))


LARGE, SMALL = "single_transformer_blocks.0.proj_mlp.weight", "x_embedder.weight"
NORM, BIAS = "transformer_blocks.0.attn.norm_added_k.weight", "transformer_blocks.0.attn.to_q.bias"


@pytest.mark.parametrize(
    ("stored", "wish", "device", "compute", "large", "small", "bias"),
    [
        # On the CPU the file stays mapped for any requested dtype except fp8, which is made at load.
        (F32, "auto", CPU, F32, F32, F32, F32),
        (BF16, "auto", CPU, F32, BF16, BF16, BF16),
        (F16, "auto", CPU, F32, F16, F16, F16),
        (FP8, "auto", CPU, BF16, FP8, FP8, FP8),
        (BF16, "bfloat16", CPU, BF16, BF16, BF16, BF16),
        (F16, "float16", CPU, F16, F16, F16, F16),
        (BF16, "float32", CPU, F32, BF16, BF16, BF16),
        (F32, "bfloat16", CPU, BF16, F32, F32, F32),
        (F32, "float16", CPU, F16, F32, F32, F32),
        (FP8, "float32", CPU, F32, FP8, FP8, FP8),
        (BF16, "float8_e4m3fn", CPU, BF16, FP8, BF16, BF16),
        (F32, "float8_e4m3fn", CPU, BF16, FP8, BF16, BF16),
        (FP8, "float8_e4m3fn", CPU, BF16, FP8, FP8, FP8),
        # An accelerator stores weights in the dtype that it computes in, or in fp8.
        (BF16, "auto", META, BF16, BF16, BF16, BF16),
        (F16, "auto", META, F16, F16, F16, F16),
        (F32, "auto", META, BF16, BF16, BF16, BF16),
        (FP8, "auto", META, BF16, FP8, FP8, FP8),
        (F32, "bfloat16", META, BF16, BF16, BF16, BF16),
        (FP8, "float16", META, F16, F16, F16, F16),
        (BF16, "float8_e4m3fn", META, BF16, FP8, BF16, BF16),
    ],
)
def test_weight_dtype_decides_storage_and_arithmetic(
    written, stored, wish, device, compute, large, small, bias
):
    path = written(dtype=stored)
    model = loaded(path, wish, device)
    parameters = dict(model.module.transformer.named_parameters())
    assert model.compute_dtype == compute
    assert [parameters[name].dtype for name in (LARGE, SMALL, BIAS, NORM)] == [large, small, bias, compute]
    assert {p.device.type for p in parameters.values()} == {device.type}
    casting = type(model.module.transformer.get_submodule(LARGE.removesuffix(".weight"))) is CastingLinear
    assert casting == (large != compute)
    if device is CPU:
        rounded = judged(FP8 if FP8 in (stored, large) else stored)
        # float8_e4m3fn does not round embedders and biases, so it is closer to the plain weights than `rounded` is.
        allowed = 1e-5 if compute == F32 else 0.2 if large != stored else 4 * torch.finfo(compute).eps
        assert error(velocity(model), rounded) < allowed


def test_fp8_made_at_load_equals_the_blocks_weights_rounded(written, tmp_path):
    path = written(dtype=BF16, layout="diffusers")
    rounded = {
        key: tensor.to(FP8).to(BF16)
        if "transformer_blocks." in key and key.endswith("weight") and ".norm_" not in key
        else tensor
        for key, tensor in load_file(path).items()
    }
    save_file(rounded, tmp_path / "rounded.safetensors")
    assert torch.equal(
        velocity(loaded(path, "float8_e4m3fn")),
        velocity(loaded(tmp_path / "rounded.safetensors", "bfloat16")),
    )


def test_an_unknown_weight_dtype_is_refused(written):
    path = written()
    with pytest.raises(RequestError, match=r"weight_dtype 'int4' is unknown; choose one of auto, bfloat16"):
        loaded(path, "int4")


def test_the_model_is_whole_and_ready(written):
    path = written()
    model = loaded(path)
    tensors = [*model.module.transformer.parameters(), *model.module.transformer.buffers()]
    assert {t.device.type for t in tensors} == {"cpu"}
    assert not any(t.requires_grad for t in tensors)
    assert not any(module.training for module in model.module.transformer.modules())
    assert sum(t.numel() * t.element_size() for t in tensors) == model.bytes
    assert len(tensors) == len(diffusers_sources(inspect_flux(path).dims))


def test_the_timestep_is_not_rounded_in_half_precision(written):
    model = loaded(written(dtype=BF16), "bfloat16")
    sigma = torch.tensor([0.8123, 0.3331])
    rounded = sigma.to(BF16).float()
    # diffusers' own forward would give the same for both.
    assert not torch.equal(velocity(model, sigma=sigma), velocity(model, sigma=rounded))
    seen = []
    model.module.transformer.time_text_embed.inner.time_proj.register_forward_pre_hook(
        lambda module, args: seen.append(args[0].clone())
    )
    velocity(model, sigma=sigma, guidance=torch.tensor([3.5, 3.3]))
    timestep, guidance = seen
    assert torch.equal(timestep, sigma * 1000)
    assert guidance.tolist() == [3504.0, 3296.0]  # rounded, as ComfyUI rounds it


def test_without_guidance_none_is_embedded_and_schnell_ignores_it(written):
    dev = loaded(written())
    disabled = velocity(dev, guidance=None)
    assert error(velocity(dev, guidance=torch.full((2,), 3.5)), disabled) > 1e-3
    embedder = dev.module.transformer.time_text_embed.inner.guidance_embedder
    for parameter in embedder.linear_2.parameters():
        parameter.data = torch.zeros_like(parameter)  # an embedding that adds nothing
    assert torch.equal(velocity(dev, guidance=torch.full((2,), 3.5)), disabled)
    schnell = loaded(written(guidance=False))
    assert torch.equal(velocity(schnell, guidance=None), velocity(schnell))


def test_positions_of_a_large_image_are_exact():
    # bf16 would round everything above 256.
    assert image_ids(2, 1026)[-1].tolist() == [0.0, 0.0, 512.0]
    assert len(set(image_ids(1026, 2)[:, 1].tolist())) == 513


def test_two_models_in_one_process_do_not_disturb_each_other(written):
    first = loaded(written())
    before = velocity(first)
    second = loaded(written(seed=1, dtype=BF16), "bfloat16")
    velocity(second, sigma=torch.tensor([0.1, 0.9]))
    assert torch.equal(velocity(first), before)


@pytest.mark.parametrize("change", ["truncated", "deleted"])
def test_a_file_that_changes_while_it_is_opened_is_refused(written, tmp_path, monkeypatch, change):
    path = shutil.copy(written(), tmp_path / "x.safetensors")

    def inspected_too_early(given):
        file = inspect_flux(given)
        path.write_bytes(path.read_bytes()[:-100]) if change == "truncated" else path.unlink()
        return file

    monkeypatch.setattr("parallel_backend.models.diffusers.load.inspect_flux", inspected_too_early)
    with pytest.raises(CheckpointError, match=r"^x\.safetensors is refused: it changed while") as refused:
        loaded(path)
    assert str(tmp_path) not in str(refused.value)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    ("dtype", "wish", "layout"),
    [(F32, "auto", "bfl"), (BF16, "auto", "diffusers"), (FP8, "auto", "bfl"), (F32, "bfloat16", "diffusers")],
)
def test_on_the_cpu_every_linear_layer_lies_in_the_mapped_file(written, dtype, wish, layout):
    path = written(layout=layout, dtype=dtype)
    model = loaded(path, wish)
    velocity(model)
    copies = [
        name
        for name, parameter in model.module.transformer.named_parameters()
        if ".norm_" not in name and not is_mapped(path, parameter)
    ]
    assert not copies
