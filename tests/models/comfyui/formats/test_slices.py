"""Layers of ComfyUI's blocks sliced for tensor parallelism: real ranks against one process, for each class in turn."""

from __future__ import annotations

import functools
import itertools

import pytest
import torch

import comfy_weight_files as files
from module_references import Reference
from parallel_backend.engine.comm.groups import Layouts
from parallel_backend.engine.load import load_under
from parallel_backend.engine.module_forward import make_module_forward
from parallel_backend.engine.tensor_parallel import slices_of
from parallel_backend.errors import RequestError
from parallel_backend.models.comfyui.formats.slices import slice_blocks
from parallel_backend.models.comfyui.tiny.cases import CASES
from parallel_backend.models.diffusers.checkpoint import inspect_flux
from parallel_backend.models.tokens.table import slices_layers
from parallel_backend.requests import STAY, ModuleCall, Placement
from parallel_backend.strategy import ParallelStrategy
from ranks import run_ranks
from tests.closed_forms.weights_traffic import tensor_bytes
from tiny_flux import write_tiny_flux

EXACT = 1e-5  # relative to the largest value
SIZE = 2, 9, 7  # rows, and sides of the latent that the ranks do not divide
TENSOR = ParallelStrategy(tensor_degree=2)
WITH_OTHERS = [TENSOR.replace(ulysses_degree=2), TENSOR.replace(ring_degree=2), TENSOR.replace(cfg_degree=2)]
pytestmark = pytest.mark.usefixtures("comfyui_here")


def _slice(model, layouts, strategy):
    """Leaves this forked rank's slice of each layer in the model."""
    slice_blocks(model.module, model.regions, slices_of(layouts.get(strategy).tensor, layouts))


def _differences(world, strategies, references):
    """Returns each model's difference from one process; the strategies take turns."""
    layouts, found, sliced = Layouts(world), {}, {}
    for (name, reference), strategy in zip(references.items(), itertools.cycle(strategies)):
        model = reference.model
        if model not in sliced:  # several calls have the same model
            _slice(model, layouts, strategy)
            sliced[model] = strategy
        assert sliced[model] == strategy
        forward = make_module_forward(model, layouts, Placement(strategy))
        found[f"{name}, {strategy.describe()}"] = reference.difference(forward, reference.mode)
    return found


@functools.cache
def _reference(kind, name):
    return Reference(*CASES[kind][name], SIZE)


def _wrong(strategies, names):
    references = {name: _reference(kind, name) for kind, name in names}
    ranks = run_ranks(_differences, strategies[0].world_size, strategies, references)
    return {name: far for of_rank in ranks for name, far in of_rank.items() if not far <= EXACT}


SLICED = {kind: list(by_name) for kind, by_name in CASES.items() if slices_layers(kind)}


def test_every_class_that_can_be_sliced_gives_what_one_process_gives():
    assert {"Flux", "Chroma", "HunyuanVideo", "QwenImageTransformer2DModel", "WanModel"} < set(SLICED)
    assert "OpenAISignatureMMDITWrapper" in SLICED
    assert _wrong([TENSOR], [(kind, name) for kind, names in SLICED.items() for name in names]) == {}


def test_slices_of_each_class_go_with_other_axes():
    """Slices do not know the other axes, so each class has one of Ulysses, Ring and CFG."""
    assert _wrong(WITH_OTHERS, [(kind, names[0]) for kind, names in SLICED.items()]) == {}


def _answers(world, paths, strategy):
    """Returns for each file (the answer of this rank's part of its model, bytes of its blocks, bytes that it sent)."""
    layouts, found = Layouts(world), {}
    for form, path in paths.items():
        model = load_under(files.spec(path), layouts, strategy)
        args, kwargs = files.inputs()
        with torch.inference_mode():
            before = layouts.traffic.bytes_sent
            forward = make_module_forward(model, layouts, Placement(strategy))
            answer = forward(ModuleCall(args, kwargs, len(args[0]), STAY))
            sent = layouts.traffic.bytes_sent - before
        blocks = [p for name, p in model.module.named_parameters() if "_blocks." in name]
        found[form] = answer, sum(getattr(p, "_qdata", p).nbytes for p in blocks), sent
    return found


FORMS = ["fp32", "bf16", "fp8", "float8_e4m3fn", "float8_e5m2", files.OLD]


def test_a_file_is_sliced_in_its_own_format(tmp_path):
    tensors = files.random_tensors(blocks=2)
    paths = {
        form: files.write(tmp_path / f"{number}.safetensors", form, tensors=tensors)
        for number, form in enumerate(FORMS)
    }
    (alone,) = run_ranks(_answers, 1, paths, ParallelStrategy())
    each_sends = tensor_bytes(TENSOR, 0, inspect_flux(paths["bf16"]).dims, rows=2, text=7, image=15)
    for of_rank in run_ranks(_answers, 2, paths, TENSOR):
        for form, (answer, held, sent) in of_rank.items():
            expected, whole, _ = alone[form]
            assert sent == each_sends, form
            assert (answer - expected).abs().max() <= EXACT * expected.abs().max(), form
            assert 0.49 < held / whole < 0.51, (
                form
            )  # norms are whole; rank 0 has all biases of summed outputs


def test_a_file_in_diffusers_key_layout_is_sliced_from_its_parts(tmp_path):
    sizes = {"single_blocks": 2, "context_dim": files.CONTEXT, "pooled_dim": files.POOLED}
    plain = {"": write_tiny_flux(tmp_path / "plain.safetensors", **sizes)}
    parts = {"": write_tiny_flux(tmp_path / "parts.safetensors", layout="diffusers", **sizes)}
    expected = run_ranks(_answers, 1, plain, ParallelStrategy())[0][""][0]
    for strategy in (TENSOR, TENSOR.replace(data_degree=2, shard_weights=True)):
        for found in run_ranks(_answers, strategy.world_size, parts, strategy):
            assert (found[""][0] - expected).abs().max() <= EXACT * expected.abs().max()


@pytest.mark.parametrize("form", ["int8 convrot", "mxfp8"])
def test_weights_with_a_scale_for_each_part_are_refused(tmp_path, form):
    spec = files.spec(files.write(tmp_path / "flux.safetensors", form))

    def refused(world):
        with pytest.raises(RequestError, match="quantised with a scale for each part") as error:
            load_under(spec, Layouts(world), TENSOR)
        return str(error.value)

    assert all("Set tensor_degree to 1" in words for words in run_ranks(refused, 2))


def test_blocks_with_layers_that_nobody_has_described_are_refused():
    reference = _reference("Flux", "flux1")

    def refused(world):
        layouts = Layouts(world)
        reference.model.module.double_blocks[0].gate = torch.nn.Linear(4, 4)
        with pytest.raises(RequestError, match=r"DoubleStreamBlock.* layers gate are not known"):
            _slice(reference.model, layouts, TENSOR)
        return True

    assert run_ranks(refused, 2) == [True, True]
