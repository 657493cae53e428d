"""ComfyUI's linear layers with some rows of their weight: in each format they give those rows of the full result."""

import pytest
import torch
from torch import nn

from comfy_weight_files import CPU, FORMATS, random_tensors, spec, write
from parallel_backend.models.comfyui.load import load
from parallel_backend.models.comfyui.tiny.cases import TinyModel

ROWS = slice(8, 24)
LAYER = "double_blocks.0.img_attn.qkv"
GIVES_ROWS = {"fp8", "float8_e4m3fn", "float8_e5m2"}
pytestmark = pytest.mark.usefixtures("comfyui_here")


@pytest.fixture(scope="module")
def tensors():
    return random_tensors(blocks=1)


@pytest.mark.parametrize("form", ["fp8", *FORMATS])
def test_a_layer_gives_rows_where_its_format_scales_all_of_them_by_one_number(tensors, form, tmp_path):
    model = load(spec(write(tmp_path / "flux.safetensors", form, tensors=tensors)), CPU)
    layer = model.module.get_submodule(LAYER)
    assert model.gives_rows(layer) == (form in GIVES_ROWS), type(layer.weight)
    if not model.gives_rows(layer):
        return
    x = torch.randn(1, 4, layer.in_features, generator=torch.Generator().manual_seed(0))
    x = x.to(model.compute_dtype)
    with torch.inference_mode():
        whole = layer(x)
        for name in ("weight", "bias"):
            if (of_all := layer._parameters.get(name)) is not None:
                rows = model.weight_rows(of_all, ROWS)
                assert len(rows) == ROWS.stop - ROWS.start
                layer._parameters[name] = rows
        found = layer(x)
    assert torch.allclose(found, whole[..., ROWS], atol=1e-6)


def _changed_by_a_function(layer):
    layer.weight_function = [lambda weight: weight]  # a new list, since all layers share the class's


def _of_another_class(layer):
    class Mine(type(layer)):
        pass

    layer.__class__ = Mine


@pytest.mark.parametrize("change", [_changed_by_a_function, _of_another_class])
def test_a_layer_whose_weight_or_code_is_not_its_own_gives_none(change):
    import comfy.ops

    layer = comfy.ops.disable_weight_init.Linear(4, 4)
    model = TinyModel(nn.Sequential(layer))
    assert model.gives_rows(layer)
    change(layer)
    assert not model.gives_rows(layer)


def test_a_layer_multiplies_where_nothing_is_cast():
    import comfy.ops

    plain, cast = comfy.ops.disable_weight_init.Linear(4, 4), comfy.ops.manual_cast.Linear(4, 4)
    model, x = TinyModel(nn.Sequential(plain, cast)), torch.ones(1, 4)
    assert model.multiplies(plain, x)
    assert not model.multiplies(plain, x.half())
    assert not model.multiplies(cast, x)
