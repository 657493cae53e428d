"""Weights that are read from the file again: after a LoRA, and after the device's memory was freed.

On the CPU weights stay in the mapped file. These tests request another dtype than the file's, so that the weights are
copies, as on a GPU.
"""

from contextlib import nullcontext

import pytest
import torch
from torch import nn

from comfy_modules import CPU, import_comfyui_here
from mapped_files import is_mapped
from parallel_backend.models.comfyui.file_weights import FileWeights
from parallel_backend.models.comfyui.jobs.patchers import root_patcher
from parallel_backend.models.comfyui.load import load
from parallel_backend.requests import ModelSpec
from tiny_flux import write_tiny_flux

LAYER = "diffusion_model.single_blocks.0.linear2.weight"


@pytest.fixture
def path(tmp_path):
    return write_tiny_flux(tmp_path / "flux.safetensors", dtype=torch.bfloat16)


@pytest.fixture
def model(path):
    return load(ModelSpec(str(path), "comfyui", "float32", import_comfyui_here()), CPU)


def _values(model):
    return {name: parameter.clone() for name, parameter in model.module.named_parameters()}


def _assert_same(found, expected):
    for name, value in expected.items():
        assert found[name].dtype == value.dtype and torch.equal(found[name], value), name


def test_weights_that_leave_the_device_lie_in_the_file_and_come_back_to_the_bit(model, path):
    expected = _values(model)
    assert not any(is_mapped(path, parameter) for parameter in model.module.parameters())
    model.leave_device()
    assert all(is_mapped(path, parameter) for parameter in model.module.parameters())
    model.come_back()
    assert not any(is_mapped(path, parameter) for parameter in model.module.parameters())
    _assert_same(_values(model), expected)


def test_a_weight_that_has_changed_stays_where_it_is(model):
    changed = torch.nn.Parameter(model.patcher.model.get_parameter(LAYER) + 1, requires_grad=False)
    model.module.single_blocks[0].linear2.weight = changed
    assert model.files.original(LAYER) is None
    model.leave_device()
    assert model.patcher.model.get_parameter(LAYER) is changed
    model.come_back()
    assert model.patcher.model.get_parameter(LAYER) is changed


def test_a_weight_that_two_modules_share_stays_one():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.other, self.alone = (nn.Linear(2, 2, bias=False) for _ in range(3))
            self.other.weight = self.one.weight

    tied = Tied()
    originals = {name: nn.Parameter(value.detach().clone()) for name, value in tied.named_parameters()}
    files = FileWeights(tied, originals, CPU, {}, nullcontext)
    files.leave()
    assert tied.one.weight is tied.other.weight and files.original("one.weight") is None
    assert tied.alone.weight is originals["alone.weight"]


@pytest.mark.parametrize("leaves", [False, True], ids=["stays", "leaves the device meanwhile"])
def test_a_patched_weight_is_kept_nowhere_and_read_again(model, path, leaves):
    expected = _values(model)
    patcher = root_patcher(model)
    change = torch.full_like(model.patcher.model.get_parameter(LAYER), 0.5)
    patcher.add_patches({LAYER: ("diff", (change,))})
    patcher.patch_model(CPU)
    (backup,) = patcher.backup.values()
    assert is_mapped(path, backup.weight)
    if leaves:
        model.leave_device()
        model.come_back()
    assert torch.equal(model.patcher.model.get_parameter(LAYER), expected[LAYER.partition(".")[2]] + 0.5)
    patcher.unpatch_model(CPU)
    assert not patcher.backup
    _assert_same(_values(model), expected)


def test_hooks_of_prompts_give_way_before_a_weight_is_read_again(model):
    """A hook restores the patched weight that it found, so it must do that before the weight is read from the file."""
    expected = _values(model)
    patcher = root_patcher(model)
    patcher.add_patches({LAYER: ("diff", (torch.full_like(model.patcher.model.get_parameter(LAYER), 0.5),))})
    patcher.patch_model(CPU)
    patched = model.patcher.model.get_parameter(LAYER)
    patcher.hook_backup[LAYER] = (patched.detach().clone(), CPU)
    patched.data.add_(1)
    patcher.unpatch_model(CPU)
    _assert_same(_values(model), expected)


def test_where_weights_stay_in_the_mapping_nothing_is_read_again(path):
    model = load(ModelSpec(str(path), "comfyui", "auto", import_comfyui_here()), CPU)
    before = dict(model.module.named_parameters())
    model.leave_device()
    model.come_back()
    assert all(parameter is before[name] for name, parameter in model.module.named_parameters())
