"""Loading: every layout, dtype and prefix computes what diffusers computes, over the mapped file, without copies."""

from __future__ import annotations

import pytest
import torch

from oracle import oracle_model, oracle_velocity
from parallel_backend.errors import CheckpointError, RequestError
from parallel_backend.models.casting import CastingLinear
from parallel_backend.models.flux import load
from parallel_backend.models.packing import image_ids, pack, text_ids, unpack
from parallel_backend.requests import Conditioning, ModelSpec
from ranks import run_ranks
from tiny_flux import write_tiny_flux

CPU = torch.device("cpu")
HEIGHT, WIDTH, TEXT = 8, 6, 7


@pytest.fixture(scope="module")
def inputs():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(1, 16, HEIGHT, WIDTH, generator=generator)
    prompt = Conditioning(
        torch.randn(1, TEXT, 64, generator=generator), torch.randn(1, 32, generator=generator), torch.tensor([3.5])
    )
    return x, torch.tensor([0.7]), prompt


@torch.no_grad()
def velocity(model, x, sigma, prompt):
    out = model.velocity(
        img_tokens=pack(x),
        context=prompt.context,
        pooled=prompt.pooled,
        sigma=sigma,
        guidance=prompt.guidance,
        img_ids=image_ids(*x.shape[-2:]),
        txt_ids=text_ids(prompt.context.shape[1]),
    )
    return unpack(out, *x.shape[-2:])


def _difference(one, other):
    return ((one - other).abs().max() / other.abs().max()).item()


@pytest.mark.parametrize("layout", ["bfl", "diffusers"])
@pytest.mark.parametrize("prefix", ["", "model.diffusion_model."])
@pytest.mark.parametrize("guidance", [True, False])
def test_fp32_equals_diffusers(tmp_path, inputs, layout, prefix, guidance):
    path = write_tiny_flux(tmp_path / "a.safetensors", layout=layout, prefix=prefix, guidance=guidance)
    expected = oracle_velocity(oracle_model(tmp_path, guidance=guidance), *inputs)
    assert _difference(velocity(load(ModelSpec(str(path)), CPU), *inputs), expected) <= 5e-6


# Relative rounding of one forward; the storage dtype's own rounding is in the reference as well.
BOUNDS = {torch.float32: 5e-6, torch.float16: 5e-3, torch.bfloat16: 1e-1}
DTYPES = {
    torch.float32: ("auto", torch.float32),
    torch.float16: ("auto", torch.float32),
    torch.bfloat16: ("auto", torch.float32),
    torch.float8_e4m3fn: ("auto", torch.bfloat16),
}


@pytest.mark.parametrize("stored", DTYPES)
@pytest.mark.parametrize("layout", ["bfl", "diffusers"])
@pytest.mark.parametrize("wish", ["auto", "bfloat16", "float16", "float32"])
def test_each_storage_and_compute_dtype(tmp_path, inputs, stored, layout, wish):
    path = write_tiny_flux(tmp_path / "a.safetensors", layout=layout, dtype=stored)
    model = load(ModelSpec(str(path), weight_dtype=wish), CPU)
    compute = DTYPES[stored][1] if wish == "auto" else getattr(torch, wish)
    assert model.compute_dtype == compute
    assert model.file.dtype == str(stored).removeprefix("torch.")
    # The same rounded weights in fp32.
    reference = load(ModelSpec(str(path), weight_dtype="float32"), CPU)
    assert _difference(velocity(model, *inputs), velocity(reference, *inputs)) <= BOUNDS[compute]
    block = model.transformer.transformer_blocks[0].attn.to_q
    assert block.weight.dtype == stored  # the mapped file is kept
    assert isinstance(block, CastingLinear) == (stored != compute)


def test_float8_is_made_from_a_larger_file_and_computed_in_bfloat16(tmp_path, inputs):
    path = write_tiny_flux(tmp_path / "a.safetensors", dtype=torch.bfloat16)
    model = load(ModelSpec(str(path), weight_dtype="float8_e4m3fn"), CPU)
    attention = model.transformer.transformer_blocks[0].attn
    assert attention.to_q.weight.dtype == torch.float8_e4m3fn
    assert attention.to_q.bias.dtype == attention.norm_q.weight.dtype == torch.bfloat16
    assert model.transformer.x_embedder.weight.dtype == torch.bfloat16
    reference = load(ModelSpec(str(path)), CPU)
    assert 1e-4 < _difference(velocity(model, *inputs), velocity(reference, *inputs)) < 0.3


def test_missing_guidance_means_three_and_a_half(tmp_path, inputs):
    model = load(ModelSpec(str(write_tiny_flux(tmp_path / "a.safetensors"))), CPU)
    x, sigma, prompt = inputs
    without = Conditioning(prompt.context, prompt.pooled, None)
    assert torch.equal(velocity(model, x, sigma, without), velocity(model, x, sigma, prompt))


def test_half_precision_keeps_the_timestep_exact(tmp_path, inputs):
    """bf16 has no number between 0.6992 and 0.7031: a rounded timestep could not tell these two apart."""
    model = load(ModelSpec(str(write_tiny_flux(tmp_path / "a.safetensors")), weight_dtype="bfloat16"), CPU)
    x, _, prompt = inputs
    near, far = torch.tensor([0.7000]), torch.tensor([0.7008])
    assert near.bfloat16() == far.bfloat16()
    assert not torch.equal(velocity(model, x, near, prompt), velocity(model, x, far, prompt))


def test_an_unknown_weight_dtype_is_refused(tmp_path):
    path = write_tiny_flux(tmp_path / "a.safetensors")
    with pytest.raises(RequestError, match="int4"):
        load(ModelSpec(str(path), weight_dtype="int4"), CPU)


def test_a_file_that_vanishes_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"gone\.safetensors"):
        load(ModelSpec(str(tmp_path / "gone.safetensors")), CPU)


def _memory() -> dict[str, int]:
    """Bytes of this process: Pss shares mapped pages out over the processes that map them."""
    with open("/proc/self/smaps_rollup") as file:
        lines = (line.split() for line in file.readlines()[1:])
        return {line[0].rstrip(":"): int(line[1]) * 1024 for line in lines}


def load_and_measure(world, path):
    """Growth of this rank's Pss once it has touched every weight, while all ranks hold theirs."""
    import torch.distributed as dist

    warm = load(ModelSpec(path.replace("large", "small")), world.device)  # imports and allocator, not weights
    before = _memory()
    model = load(ModelSpec(path), world.device)
    touched = sum(parameter.sum().item() for parameter in model.transformer.parameters())
    dist.barrier(world.group)
    after = _memory()
    dist.barrier(world.group)
    assert touched == touched and warm is not None
    return after["Pss"] - before["Pss"]


@pytest.mark.parametrize("layout", ["bfl", "diffusers"])
def test_two_ranks_share_one_copy_on_the_host(tmp_path, layout):
    write_tiny_flux(tmp_path / "small.safetensors", layout=layout)
    path = write_tiny_flux(
        tmp_path / "large.safetensors", layout=layout, heads=4, double_blocks=2, single_blocks=3, dtype=torch.float32
    )
    size = path.stat().st_size
    assert size > 100e6
    growth = run_ranks(load_and_measure, 2, str(path))
    assert sum(growth) <= 1.15 * size
