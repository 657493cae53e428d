"""Files with damaged quantised layers are refused from their header before ranks read them, or by the rank."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from comfy_weight_files import CPU, FORMATS, OLD, random_tensors, spec, write
from parallel_backend.errors import CheckpointError
from parallel_backend.models.comfyui.load import load
from parallel_backend.models.comfyui.model_file import inspect

LAYER = "double_blocks.0.img_mlp.0"
NOTE = f"{LAYER}.comfy_quant"
NEW = list(FORMATS)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder, tensors = tmp_path_factory.mktemp("quantised"), random_tensors(blocks=1)
    return {
        form: write(folder / f"{number}.safetensors", form, tensors=tensors)
        for number, form in enumerate([*NEW, OLD])
    }


def damaged(path, folder, change):
    """Writes a copy of the file with tensors that `change` has changed, and returns its path."""
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, folder / "damaged.safetensors")
    return folder / "damaged.safetensors"


def text(words: str) -> torch.Tensor:
    return torch.tensor(list(words.encode()), dtype=torch.uint8)


@pytest.mark.parametrize("form", [*NEW, OLD])
def test_an_intact_file_passes(files, form):
    assert inspect(files[form]).tensor_bytes > 0


def without(name):
    return lambda tensors: tensors.pop(f"{LAYER}.{name}")


def with_seven_scales(tensors):
    scale = tensors[f"{LAYER}.weight_scale"]
    tensors[f"{LAYER}.weight_scale"] = torch.ones(7, dtype=torch.float32).to(scale.dtype)


def without_rows(tensors):
    tensors[f"{LAYER}.weight"] = tensors[f"{LAYER}.weight"][:0]


def of_whole_numbers(tensors):
    tensors["img_in.weight"] = torch.ones(256, 64, dtype=torch.int32)


DAMAGE = [
    ([*NEW, OLD], without("weight"), rf"damaged\.safetensors is refused: .*'{LAYER}' has no weight\."),
    (NEW, without("weight_scale"), rf"'{LAYER}' has no weight_scale"),
    (["nvfp4"], without("weight_scale_2"), "has no weight_scale_2"),
    (NEW, with_seven_scales, r"has 7 values where its weight of shape \[1024, \d+\] needs \d+"),
    (NEW, without_rows, rf"'{LAYER}' has the shape \[0, \d+\]"),
    (["int8"], of_whole_numbers, r"the weight 'img_in.weight' is of whole numbers \(I32\)"),
]


@pytest.mark.parametrize(
    ("form", "change", "words"), [(form, *damage) for forms, *damage in DAMAGE for form in forms]
)
def test_a_damaged_layer_is_refused_by_name(files, tmp_path, form, change, words):
    with pytest.raises(CheckpointError, match=words):
        inspect(damaged(files[form], tmp_path, change))


def test_a_layer_that_is_missing_altogether_is_refused_by_the_rank_without_a_crash(files, tmp_path):
    def change(tensors):
        for key in [key for key in tensors if key.startswith(f"{LAYER}.")]:
            del tensors[key]

    path = damaged(files["int8"], tmp_path, change)
    with pytest.raises(CheckpointError, match=rf"it has no weight for {LAYER}"):
        load(spec(path), CPU)


@pytest.mark.parametrize(
    ("note", "words"),
    [
        (text("{no json"), "is not valid JSON"),
        (text("[" * 50_000), "is not valid JSON"),
        (text("[1]"), "is not a JSON object"),
        (text("{}"), "names no format"),
        (text('{"format": 3}'), "names no format"),
        (torch.zeros(3), "is no text of at most 65536 bytes"),
        (torch.zeros(65_537, dtype=torch.uint8), "is no text of at most 65536 bytes"),
    ],
)
def test_a_note_that_cannot_be_read_is_refused(files, tmp_path, note, words):
    path = damaged(files["int8"], tmp_path, lambda tensors: tensors.update({NOTE: note}))
    with pytest.raises(CheckpointError, match=words):
        inspect(path)


@pytest.mark.parametrize(
    ("noted", "words"),
    [
        *((noted, "_quantization_metadata") for noted in ("{no json", "[]", "{}")),
        (json.dumps({"layers": {LAYER: 1}}), "names no format"),
        (json.dumps({"layers": {LAYER: {"format": "int8_tensorwise"}}}), "has no weight_scale"),
    ],
)
def test_metadata_are_read_and_the_layers_that_they_note_are_checked(files, tmp_path, noted, words):
    path = tmp_path / "damaged.safetensors"
    tensors = {
        key: found for key, found in load_file(files["int8"]).items() if not key.endswith("comfy_quant")
    }
    del tensors[f"{LAYER}.weight_scale"]
    save_file(tensors, path, {"_quantization_metadata": noted})
    with pytest.raises(CheckpointError, match=words):
        inspect(path)


def test_a_format_that_this_comfyui_does_not_have_is_refused_by_the_rank_without_a_crash(files, tmp_path):
    change = {NOTE: text('{"format": "int5_someday"}')}
    path = damaged(files["int8"], tmp_path, lambda tensors: tensors.update(change))
    inspect(path)
    with pytest.raises(CheckpointError, match=r"ComfyUI cannot build a model from .*int5_someday"):
        load(spec(path), CPU)
