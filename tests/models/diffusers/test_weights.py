"""Changing a rank's weights: the values of a merged file however weights are held, and the file's own again."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from diffusers import FluxTransformer2DModel
from safetensors.torch import load_file

from differences import relative_difference
from flux_requests import CONTEXT, POOLED
from lora_files import DIFFUSERS, LAYOUTS
from lora_patches import BIAS, NORM, H, lora, merge, patch
from nccl_semantics import NCCL_STREAMS
from parallel_backend.engine.comm.groups import Layouts
from parallel_backend.engine.factory import make_forward
from parallel_backend.engine.load import load_under
from parallel_backend.errors import RequestError
from parallel_backend.models.diffusers.keys import diffusers_sources
from parallel_backend.models.diffusers.load import load
from parallel_backend.requests import ModelSpec, Placement
from parallel_backend.sampling.denoise import denoise
from parallel_backend.strategy import ParallelStrategy
from ranks import run_ranks
from spread_weights import CASES
from tiny_flux import tiny_flux_config, write_tiny_flux

CPU = torch.device("cpu")
CASE = CASES["odd sides, cfg 4, batch 3"]
SLICED = ParallelStrategy(tensor_degree=2)
QKV = "double_blocks.0.img_attn.qkv.weight"


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """The tiny Flux in both layouts and as a merged file of two stacked LoRAs."""
    folder = tmp_path_factory.mktemp("flux")
    sizes = {"context_dim": CONTEXT, "pooled_dim": POOLED}
    paths = {
        x: str(write_tiny_flux(folder / f"{x}.safetensors", layout=x, **sizes)) for x in ("bfl", "diffusers")
    }
    both = lora()[1], lora(strength=-0.5, seed=1)[1]
    return {**paths, "merged": merge(paths["bfl"], folder / "merged.safetensors", *both)}


def stack():
    (one, _), (two, _) = lora(), lora(strength=-0.5, seed=1)
    return (*one.patches, *two.patches), {**one.tensors, **two.tensors}


def entangled():
    """Changes whose rows depend on other rows: norms per input, and a Kronecker product."""
    generator, tensors = torch.Generator().manual_seed(9), {}
    up, down = (0.1 * torch.randn(size, generator=generator) for size in ((3 * H, 4), (4, H)))
    magnitude = 0.5 + torch.rand(1, H, generator=generator)
    dora = patch(tensors, QKV, "lora", 0.7, up=up, down=down, dora_scale=magnitude)
    whole = {name: 0.3 * torch.randn(16, 16, generator=generator) for name in ("w1", "w2")}
    return (dora, patch(tensors, "double_blocks.0.img_attn.proj.weight", "lokr", 1.0, **whole)), tensors


def parameters(model):
    return {n: p for chunk in model.chunks for n, p in chunk.named_parameters()}


def bits(model):
    return {name: p.detach().clone().view(torch.uint8) for name, p in parameters(model).items()}


def assert_same_bits(model, before):
    now = bits(model)
    assert all(now[name].equal(before[name]) for name in before)


@pytest.mark.parametrize("layout", ["bfl", "diffusers"])
def test_the_weights_become_those_of_a_merged_file_and_views_of_the_file_again(files, layout):
    model, merged = load(ModelSpec(files[layout]), CPU), load(ModelSpec(files["merged"]), CPU)
    before, addresses = bits(model), {n: p.data_ptr() for n, p in parameters(model).items()}
    names = set(before)
    patches, tensors = stack()
    assert model.weights.apply(patches, tensors) == 10
    expected = parameters(merged)
    for name, found in parameters(model).items():
        if layout == "diffusers" and name.startswith("norm_out"):  # its halves lie the other way round
            continue
        wanted = expected[name]
        assert (found - wanted).abs().max() <= 1e-6 * wanted.abs().max(), name
    unchanged = [n for n in names if parameters(model)[n].data_ptr() == addresses[n]]
    assert 0 < len(unchanged) < len(names)
    assert model.weights.apply(patches, tensors) == 0, "nothing to do"
    assert model.weights.apply((), {}) == 10
    assert_same_bits(model, before)
    assert addresses == {n: p.data_ptr() for n, p in parameters(model).items()}


@pytest.mark.parametrize("layout", ["bfl", "diffusers"])
def test_a_lora_in_diffusers_names_gives_what_diffusers_own_loader_fuses(files, layout):
    judge = FluxTransformer2DModel(**tiny_flux_config(context_dim=CONTEXT, pooled_dim=POOLED))
    judge.load_state_dict(load_file(files["diffusers"]))
    adapter = {key.removeprefix("transformer."): tensor for key, tensor in LAYOUTS["peft"].items()}
    judge.load_lora_adapter(adapter, prefix=None)
    judge.fuse_lora(lora_scale=0.8)
    fused = {
        name.replace(".base_layer", ""): p for name, p in judge.state_dict().items() if "lora_" not in name
    }

    model, tensors, patches = load(ModelSpec(files[layout]), CPU), {}, []
    sources = diffusers_sources(model.file.dims)
    for name in DIFFUSERS:
        source = sources[f"{name}.weight"]
        narrow = () if source.start is None else (0, source.start, source.stop - source.start)
        up, down = adapter[f"{name}.lora_B.weight"], adapter[f"{name}.lora_A.weight"]
        change = patch(tensors, source.key, "lora", 0.8, None, narrow, up=up, down=down)
        patches.append(replace(change, swap_halves=source.swap_halves))
    before = {name: p.detach().clone() for name, p in parameters(model).items()}
    model.weights.apply(patches, tensors)
    changed = 0
    for name, found in parameters(model).items():
        wanted = fused[name.replace("norm_out.linear.inner.", "norm_out.linear.").replace(".inner.", ".")]
        if name.startswith("norm_out") and layout == "bfl":
            wanted = torch.cat([*reversed(wanted.chunk(2))])
        assert (found - wanted).abs().max() <= 1e-6 * wanted.abs().max(), name
        changed += not found.equal(before[name])
    assert changed == len(DIFFUSERS)


def test_only_what_differs_is_computed_again(files):
    model = load(ModelSpec(files["bfl"]), CPU)
    one, _ = lora()
    model.weights.apply(one.patches, one.tensors)
    tensors = dict(one.tensors)
    added = patch(tensors, QKV, "diff", 1.0, diff=torch.ones(3 * H, H))
    assert model.weights.apply((*one.patches, added), tensors) == 1
    without = tuple(p for p in one.patches if p.key != QKV)
    assert model.weights.apply(without, tensors) == 1


def sample_with_loras(world, path, strategy, changes=stack):
    """Latents without, with, and again without `changes`, on one rank."""
    layouts = Layouts(world)
    model = load_under(ModelSpec(path), layouts, strategy)
    forward = make_forward(model, layouts, Placement(strategy))

    def run():
        return denoise(forward, CASE, lambda i, denoised: None)

    patches, tensors = changes()
    before = run()
    model.weights.check(patches, tensors)
    touched = model.weights.apply(patches, tensors)
    during = run()
    model.weights.apply((), {})
    return {"before": before, "during": during, "after": run(), "touched": touched}


@pytest.fixture(scope="module")
def expected(files):
    return run_ranks(sample_merged, 1, files["merged"])[0]


def sample_merged(world, path):
    layouts = Layouts(world)
    forward = make_forward(load(ModelSpec(path), CPU), layouts, Placement())
    return denoise(forward, CASE, lambda i, denoised: None)


@pytest.mark.parametrize("layout", ["bfl", "diffusers"])
@pytest.mark.parametrize(
    "strategy",
    [
        ParallelStrategy(ulysses_degree=2),
        ParallelStrategy(ulysses_degree=2, shard_weights=True),
        ParallelStrategy(cfg_degree=2, offload_weights=True),
        ParallelStrategy(tensor_degree=2),
        ParallelStrategy(pipefusion_degree=2, warmup_steps=99),
    ],
    ids=lambda strategy: strategy.describe(),
)
def test_every_way_of_holding_weights_gives_the_latent_of_a_merged_file(files, expected, strategy, layout):
    for rank, found in enumerate(
        run_ranks(sample_with_loras, 2, files[layout], strategy, backend=NCCL_STREAMS)
    ):
        assert relative_difference(found["during"], expected) <= 1e-5, f"rank {rank}"
        assert relative_difference(found["before"], expected) > 1e-2, "there was something to apply"
        assert found["after"].equal(found["before"])
        assert found["touched"] == 10


@pytest.mark.parametrize(
    "strategy", [ParallelStrategy(ulysses_degree=2, shard_weights=True), SLICED], ids=lambda s: s.describe()
)
def test_changes_that_need_the_whole_tensor_are_cut_after_them(files, strategy):
    (whole,) = run_ranks(sample_with_loras, 1, files["diffusers"], ParallelStrategy(), entangled)
    assert relative_difference(whole["during"], whole["before"]) > 1e-2
    for found in run_ranks(
        sample_with_loras, 2, files["diffusers"], strategy, entangled, backend=NCCL_STREAMS
    ):
        assert relative_difference(found["during"], whole["during"]) <= 1e-5
        assert found["after"].equal(found["before"])


@pytest.mark.parametrize(
    ("dtype", "wish"),
    [
        (torch.bfloat16, "auto"),
        (torch.float16, "auto"),
        (torch.float32, "float8_e4m3fn"),
        (torch.float8_e4m3fn, "auto"),
    ],
    ids=lambda value: str(value).removeprefix("torch."),
)
def test_a_change_starts_from_the_stored_value_and_is_rounded_to_nearest(tmp_path, dtype, wish):
    path = write_tiny_flux(tmp_path / "half.safetensors", dtype=dtype)
    model = load(ModelSpec(str(path), weight_dtype=wish), CPU)
    before, stored = bits(model), parameters(model)["transformer_blocks.0.attn.to_k.weight"].detach().clone()
    patches, deltas = lora()
    model.weights.apply(patches.patches, patches.tensors)
    found = parameters(model)["transformer_blocks.0.attn.to_k.weight"]
    wanted = (stored.float() + deltas[QKV][1][H : 2 * H]).to(stored.dtype)
    steps = (found.view(torch.uint8).int() - wanted.view(torch.uint8).int()).abs()
    assert found.dtype == wanted.dtype
    assert (steps > 0).float().mean() < 1e-3, "equal but for ties"
    model.weights.apply((), {})
    assert_same_bits(model, before)


def test_fp8_holds_its_largest_value_where_a_change_goes_beyond(tmp_path):
    path = write_tiny_flux(tmp_path / "fp8.safetensors", dtype=torch.float8_e4m3fn)
    model, tensors = load(ModelSpec(str(path)), CPU), {}
    model.weights.apply((patch(tensors, QKV, "diff", 1.0, diff=torch.full((3 * H, H), -1e4)),), tensors)
    assert parameters(model)["transformer_blocks.0.attn.to_q.weight"].float().eq(-448).all()


@pytest.mark.parametrize(
    ("dtype", "value", "words"),
    [
        (torch.float32, 3.4e38, "infinite or NaN"),
        (torch.float16, 1e5, "float16 cannot hold"),
    ],
)
def test_a_result_that_cannot_be_held_is_refused_and_nothing_changes(tmp_path, dtype, value, words):
    path = write_tiny_flux(tmp_path / "tiny.safetensors", dtype=dtype)
    model = load(ModelSpec(str(path)), CPU)
    one, _ = lora()
    model.weights.apply(one.patches, one.tensors)
    before, tensors = bits(model), dict(one.tensors)
    worse = (
        patch(tensors, BIAS, "diff", 1.0, diff=torch.ones(4 * H)),
        *(patch(tensors, QKV, "diff", 2.0, diff=torch.full((3 * H, H), value)) for _ in range(2)),
    )
    with pytest.raises(RequestError, match=rf"double_blocks\.0\.img_attn\.qkv\.weight.*{words}|{words}"):
        model.weights.apply(worse, tensors)
    assert_same_bits(model, before)
    assert model.weights.apply(one.patches, one.tensors) == 0


@pytest.mark.parametrize("room", [True, False], ids=["room for originals", "no room"])
def test_a_device_keeps_the_files_values_beside_changed_ones_where_it_has_room(files, room):
    """On the CPU the mapped file is at hand; a GPU has only these two ways."""
    model = load(ModelSpec(files["diffusers"]), CPU)
    weights, reads = model.weights, []
    weights._held = {
        key: [replace(part, original=None) for part in held] for key, held in weights._held.items()
    }
    for part in (part for held in weights._held.values() for part in held):
        part.tensor.data = part.tensor.data.clone()  # as on a GPU: memory of its own
    read, weights._room = weights._read, lambda nbytes: room
    weights._read = lambda key: reads.append(key) or read(key)
    before, (patches, tensors) = bits(model), stack()
    one, _ = lora(strength=0.3)
    weights.apply(patches, tensors)
    changed = bits(model)
    reads.clear()
    weights.apply(one.patches, one.tensors)
    assert (reads == []) == room
    weights.apply(patches, tensors)
    assert_same_bits(model, changed)
    weights.release_originals()  # a sleep takes them
    weights.apply(one.patches, one.tensors)
    weights.apply((), {})
    assert_same_bits(model, before)


def test_what_the_model_does_not_have_is_refused(files):
    model, tensors = load(ModelSpec(files["bfl"]), CPU), {}
    change = patch(tensors, "double_blocks.7.img_attn.proj.weight", "diff", 1.0, diff=torch.ones(H, H))
    with pytest.raises(
        RequestError, match=r"double_blocks\.7\.img_attn\.proj\.weight, which bfl\.safetensors does not"
    ):
        model.weights.check((change,), tensors)
    norm = patch({}, NORM, "set", 1.0, value=torch.ones(128))
    with pytest.raises(RequestError, match="was not sent"):
        model.weights.check((norm,), {})
