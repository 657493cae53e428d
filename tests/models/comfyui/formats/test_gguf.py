"""GGUF files for ComfyUI's own modules: weights stay packed until they are used."""

from __future__ import annotations

import shutil
import sys
from collections import Counter
from pathlib import Path

import gguf
import numpy
import pytest
import torch

from comfy_weight_files import CPU, inputs, random_tensors, spec
from differences import relative_difference
from gguf_files import finish, write, write_unpacked
from mapped_files import is_mapped
from parallel_backend.errors import CheckpointError
from parallel_backend.models.comfyui.formats.gguf import LAYOUT, is_packed
from parallel_backend.models.comfyui.load import load
from parallel_backend.models.comfyui.model_file import inspect
from parallel_backend.models.dtypes import BYTES_PER_VALUE, GGUF
from parallel_backend.models.gguf_file import PLAIN
from parallel_backend.models.staging import component_tensors

# Relative to the largest value. Weights unpack in float16, ComfyUI-GGUF's default; the package gguf uses float32.
TOLERANCE = 3e-3
WEIGHT = "double_blocks.0.img_mlp.0.weight"
pytestmark = pytest.mark.usefixtures("comfyui_here")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("gguf")


@pytest.fixture(scope="module")
def tensors():
    return random_tensors(blocks=1)


@pytest.fixture(scope="module")
def whole(folder, tensors):
    return write(folder / "whole.gguf", "Q8_0", tensors=tensors)


@torch.inference_mode()
def answer(module):
    args, kwargs = inputs()
    return module(*args, **kwargs)


@pytest.mark.parametrize("kind", [*GGUF, "BF16", "F16"])
def test_every_format_computes_as_its_unpacked_weights_do(folder, tensors, kind):
    path = write(folder / f"{kind}.gguf", kind, tensors=tensors)
    unpacked = write_unpacked(folder / f"{kind}.safetensors", kind, tensors=tensors)
    expected = answer(load(spec(unpacked), CPU).module)
    model = load(spec(path), CPU)
    assert relative_difference(answer(model.module), expected) <= TOLERANCE
    weight = model.module.get_parameter(WEIGHT)
    assert is_packed(weight) == (kind in GGUF)
    final = tensors["final_layer.linear.weight"].half().float()
    assert torch.equal(model.module.final_layer.linear.weight, final)
    sizes = Counter()
    for one in gguf.GGUFReader(path).tensors:
        sizes[one.tensor_type.name] += int(one.n_bytes)
    ((most, _),) = sizes.most_common(1)
    assert (model.stored_dtype, model.bytes) == (PLAIN.get(most, most), sizes.total())
    if kind in GGUF:
        assert weight.nbytes == weight.numel() * GGUF[kind] == weight.numel() * BYTES_PER_VALUE[kind]
        assert is_mapped(path, component_tensors(weight)[0][0]), "a view of the file"


def truncate(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def cut_the_header(path):
    path.write_bytes(path.read_bytes()[:100])


def no_gguf(path):
    path.write_bytes(b"GGUX" + path.read_bytes()[4:])


def another_format(path):
    writer = gguf.GGUFWriter(str(path), "flux")
    form = gguf.GGMLQuantizationType.IQ2_XXS
    writer.add_tensor("img_in.weight", numpy.zeros((256, 66), numpy.uint8), raw_dtype=form)
    finish(writer, path)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (truncate, "it is no whole GGUF file"),
        (cut_the_header, "it is no whole GGUF file"),
        (no_gguf, "it is no whole GGUF file"),
        (another_format, "img_in.weight is in the format IQ2_XXS, .* Choose a file in one of Q8_0"),
        (Path.unlink, "it cannot be read"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_file_that_cannot_be_read_is_refused_with_its_name_and_the_remedy(whole, tmp_path, damage, words):
    path = shutil.copy(whole, tmp_path / "damaged.gguf")
    damage(path)
    for read in (inspect, lambda path: load(spec(path), CPU)):
        with pytest.raises(CheckpointError, match=rf"damaged\.gguf is refused: {words}"):
            read(path)


def test_without_the_package_that_reads_it_the_error_says_how_to_get_it(whole, monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(CheckpointError, match=r"whole\.gguf is a GGUF file.*pip install gguf"):
        inspect(whole)


@pytest.mark.parametrize("lacks", ["comfy_kitchen.tensor.base", "CoreModelPatcher"])
def test_a_comfyui_that_is_too_old_for_it_is_said_to_be(whole, monkeypatch, lacks):
    if lacks == "CoreModelPatcher":
        monkeypatch.delattr("comfy.model_patcher.CoreModelPatcher")
    else:
        monkeypatch.setitem(sys.modules, lacks, None)
        monkeypatch.delitem(sys.modules, LAYOUT, raising=False)
    with pytest.raises(CheckpointError, match=r"whole\.gguf holds packed .* too old. Update ComfyUI"):
        load(spec(whole), CPU)


def test_what_is_no_diffusion_model_is_said_to_be_none(folder):
    path = folder / "text.gguf"
    writer = gguf.GGUFWriter(str(path), "t5encoder")
    writer.add_tensor("enc.blk.0.attn_q.weight", numpy.zeros((256, 256), numpy.float16))
    finish(writer, path)
    with pytest.raises(CheckpointError, match=r"ComfyUI does not know what model .*text\.gguf holds"):
        load(spec(path), CPU)
