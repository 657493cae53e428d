"""Files in ComfyUI's quantised formats: loaded as views of the file, computed as in ComfyUI, split over ranks."""

from __future__ import annotations

import math
from importlib import import_module

import pytest
import torch

import gguf_files
from comfy_modules import import_comfyui_here
from comfy_weight_files import CPU, FORMATS, HIDDEN, OLD, inputs, random_tensors, spec, write
from differences import relative_difference
from mapped_files import is_mapped
from parallel_backend.engine.comm.groups import Layouts
from parallel_backend.engine.load import load_under
from parallel_backend.engine.module_forward import make_module_forward
from parallel_backend.engine.sharding import ByteSharding
from parallel_backend.models.base import ModelPart
from parallel_backend.models.comfyui.load import load
from parallel_backend.models.staging import StagedReader, component_tensors
from parallel_backend.requests import BLOCK, ROWS, STAY, ModuleCall, Placement
from parallel_backend.strategy import ParallelStrategy
from ranks import run_ranks

FORMS, PACKED = ["fp8", *FORMATS, OLD], ["Q4_K", "Q8_0"]
STAGED = ParallelStrategy(pipefusion_degree=2)
TOLERANCE = 1e-5
# Formats that round a token's activations to 8 or 4 bits: (module, function) of comfy_kitchen that does it.
ROUNDED = {
    "int8": ("quantization", "quantize_int8_rowwise"),
    "int8 convrot": ("quantization", "quantize_int8_rowwise"),
    "convrot w4a4": ("convrot_w4a4", "quantize_signed_int4_rowwise"),
}
WEIGHT = "double_blocks.0.img_mlp.0.weight"


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder, tensors, more = (
        tmp_path_factory.mktemp("formats"),
        random_tensors(blocks=1),
        random_tensors(blocks=2),
    )
    found = {
        form: write(folder / f"{number}.safetensors", form, tensors=tensors)
        for number, form in enumerate(FORMS)
    }
    found |= {kind: gguf_files.write(folder / f"{kind}.gguf", kind, tensors=more) for kind in PACKED}
    return {form: str(path) for form, path in found.items()}


@pytest.fixture(scope="module")
def alone(files):
    """The answer of one process, by format."""
    return {form: answer(load(spec(path), CPU).module) for form, path in files.items()}


@pytest.fixture(scope="module")
def split(files):
    """Answers of each of two ranks, by format, in four ways: tokens gathered by each block, rows split, rows split with
    sharded weights, and tokens sent before they are projected. Files of two blocks also have them in two stages."""
    with pytest.MonkeyPatch.context() as patch:
        for module, name in set(ROUNDED.values()):
            module = import_module(f"comfy_kitchen.backends.eager.{module}")
            patch.setattr(module, name, SteadyRounding(getattr(module, name)))
        for form in ROUNDED:
            answer(load(spec(files[form]), CPU).module)
        return run_ranks(split_answers, 2, files)


class SteadyRounding:
    """A rounding function that rounds a token as it did the first time, if only last bits differ.

    The last bit of a sum can move a value at the edge between two codes to the other code, and later layers amplify
    that: to 2e-3 of the result with AVX2, not at all with AVX-512. Any other effect of a split still shows.
    """

    def __init__(self, quantise):
        self._quantise, self._seen = quantise, []

    def __call__(self, x, stochastic_rounding=0):
        found = self._quantise(x, stochastic_rounding=stochastic_rounding)
        for tokens, rounded in self._seen:
            if tokens.shape[1] == x.shape[1]:
                off, nearest = torch.cdist(x, tokens, p=math.inf).min(dim=1)
                same = off <= TOLERANCE * x.abs().amax(dim=1)
                for own, first in zip(found, rounded, strict=True):
                    own[same] = first[nearest[same]]
        self._seen.append((x.clone(), found))  # a copy, since layers may write into x later
        return found


def split_answers(world, paths):
    layouts, results = Layouts(world), {}
    whole, shared = (ParallelStrategy(ulysses_degree=2, shard_weights=shards) for shards in (False, True))
    for form, path in paths.items():
        model = load(spec(path), CPU)
        sharding = ByteSharding(layouts.get(shared).shard, CPU, offload=False)
        sharded = load(spec(path), CPU, ModelPart(byte_sharding=sharding))
        forward = make_module_forward(model, layouts, Placement(whole))
        of_shares = make_module_forward(sharded, layouts, Placement(shared))
        sending = make_module_forward(model, layouts, Placement(whole.replace(sends_tokens=True)))
        ways = [(forward, BLOCK), (forward, ROWS), (of_shares, ROWS), (sending, STAY)]
        if form in PACKED:
            model = load_under(spec(path), layouts, STAGED)
            ways.append((make_module_forward(model, layouts, Placement(STAGED)), STAY))
        args, kwargs = inputs()
        with torch.inference_mode():
            results[form] = [
                run(ModuleCall(args, dict(kwargs), rows=2, tokens=tokens)) for run, tokens in ways
            ]
    return results


def answer(module):
    args, kwargs = inputs()
    with torch.inference_mode():
        return module(*args, **kwargs)


@pytest.mark.parametrize("form", FORMS)
def test_a_format_computes_as_in_comfyui_from_views_of_the_file(files, form):
    import comfy.sd

    module = load(spec(files[form]), CPU).module
    stock = comfy.sd.load_diffusion_model(files[form]).model.diffusion_model
    assert answer(module).equal(answer(stock))
    codes = component_tensors(module.get_parameter(WEIGHT))[0][0]
    assert codes.dtype.itemsize == 1, "as the file has them"
    assert is_mapped(files[form], codes)


@pytest.mark.xdist_group("split_formats")
@pytest.mark.parametrize("form", FORMS + PACKED)
def test_a_format_split_over_ranks_computes_as_on_one(alone, split, form):
    one, other = alone[form], alone["float8_e5m2" if form != "float8_e5m2" else "int8"]
    assert relative_difference(other, one) > 100 * TOLERANCE, "another format's rounding shows"
    for results in split:
        tokens, rows, shares, *others = results[form]
        assert max(relative_difference(found, one) for found in (tokens, rows, *others)) <= TOLERANCE
        assert shares.equal(rows)


# `alone`: True if the rounding of a token, on a GPU that multiplies in this format, does not depend on other tokens.
@pytest.mark.parametrize(
    ("layout", "options", "alone"),
    [
        ("TensorCoreFP8E4M3Layout", {"scale": None}, True),
        ("TensorCoreMXFP8Layout", {}, True),
        ("TensorCoreNVFP4Layout", {"scale": None}, False),
        ("TensorCoreNVFP4Layout", {"scale": torch.tensor(0.002)}, True),
    ],
)
def test_only_nvfp4_without_an_input_scale_rounds_activations_by_a_maximum_over_all_tokens(
    layout, options, alone
):
    import_comfyui_here()
    from comfy.quant_ops import QuantizedTensor

    tokens = torch.randn(64, HIDDEN, generator=torch.Generator().manual_seed(0))
    tokens[50] *= 10
    whole = QuantizedTensor.from_float(tokens.clone(), layout, **options).dequantize()
    part = QuantizedTensor.from_float(tokens[:32].clone(), layout, **options).dequantize()
    assert part.equal(whole[:32]) is alone


@pytest.mark.parametrize("form", ROUNDED)
def test_int8_and_w4a4_round_the_activations_of_each_token_by_itself(files, form):
    layer = load(spec(files[form]), CPU).module.double_blocks[0].img_mlp[0]
    tokens = torch.randn(64, HIDDEN, generator=torch.Generator().manual_seed(0))
    tokens[50] *= 10
    assert relative_difference(layer(tokens[:32]), layer(tokens)[:32]) <= TOLERANCE
    rounded, exact = layer(tokens), torch.nn.functional.linear(tokens, layer.weight.dequantize(), layer.bias)
    assert relative_difference(rounded, exact) > 1e-3, "they are rounded"


@pytest.mark.parametrize("form", FORMS)
def test_weights_for_a_gpu_come_by_large_reads_of_the_file(files, form, monkeypatch):
    """The reads cover every tensor left in the mapping. ComfyUI made the others: scales, layers in another dtype."""
    expected, readers = load(spec(files[form]), CPU), []

    def as_on_a_gpu(path, opened, device):
        readers.append(StagedReader(path, opened, device, piece=10_000))
        return readers[0]

    monkeypatch.setattr(import_module(load.__module__), "staged_reader", as_on_a_gpu)
    found, in_file = load(spec(files[form]), CPU), 0
    for name, parameter in expected.module.named_parameters():
        pieces = component_tensors(parameter)[0]
        others = component_tensors(found.module.get_parameter(name))[0]
        assert [_bits(one) for one in pieces] == [_bits(one) for one in others]
        in_file += sum(one.nbytes for one in pieces if is_mapped(files[form], one))
    assert 0.5 * expected.bytes < in_file <= readers[0].bytes_read <= expected.bytes


def _bits(tensor):
    return tensor.dtype, tensor.shape, tensor.detach().reshape(-1).view(torch.uint8).numpy().tobytes()
