"""Stages of ComfyUI's modules: whole images against one process, and patches with the keys of the same call."""

from __future__ import annotations

import copy

import pytest
import torch

from comfy_modules import import_comfyui_here
from parallel_backend.engine.groups import Layouts
from parallel_backend.engine.kept_keys import KeptKeys
from parallel_backend.engine.module_forward import make_module_forward
from parallel_backend.engine.module_stages import Patch
from parallel_backend.models.comfyui.patches import ARGUMENT
from parallel_backend.models.comfyui.table import TABLE, has_stages
from parallel_backend.models.comfyui.tiny.cases import CASES, TinyModel
from parallel_backend.models.comfyui.tiny.weights import fill
from parallel_backend.requests import STAY, ModuleCall, Placement
from parallel_backend.sampling.element_patches import ElementPatches
from parallel_backend.strategy import ParallelStrategy
from ranks import run_ranks

EXACT = 1e-5  # of the largest value
ROWS, SIZE, PATCHES = 2, (9, 7), 4  # tokens that patches do not divide
STAGED = [name for name in TABLE if has_stages(name)]
TWO = ParallelStrategy(pipefusion_degree=2)


@pytest.fixture(scope="module", autouse=True)
def _comfyui():
    import_comfyui_here()


def _call(inputs):
    args, kwargs = inputs(ROWS, *SIZE)
    return ModuleCall(args, {**kwargs, "transformer_options": {}}, ROWS, STAY)


def _far(one, other, largest):
    return ((one - other).abs().max() / largest).item() if one.numel() else 0.0


def _case(layouts, model, call):
    """How far this rank's answers are from one process', whole and by patches that find keys of that whole call."""
    expected = model.module(*copy.deepcopy(call.args), **copy.deepcopy(call.kwargs))
    largest = expected.abs().max()
    forward, keys = make_module_forward(model, layouts, Placement(TWO)), KeptKeys()
    answer = forward(copy.deepcopy(call), keys=keys)
    found = {"whole": _far(answer, expected, largest), "masked": keys.masked}
    if keys.masked:
        return found
    stages = forward.stages
    owners = stages.owners(copy.deepcopy(call), PATCHES)
    found["owned"] = int(owners.min()) >= 0
    split = ElementPatches(owners, answer.shape[1:], PATCHES)
    for kind, poison in (("patches", 0.0), ("other keys", 1.0)):
        for held in keys._held.values():
            for tensor in held:
                tensor += poison
        found[kind] = 0.0
        for number in range(PATCHES):
            one = stages.patch(copy.deepcopy(call), Patch(number, PATCHES), keys)
            if one is not None:
                difference = _far(split.take(one, number), split.take(expected, number), largest)
                found[kind] = max(found[kind], difference)
        stages.settle()
    return found


@torch.inference_mode()
def staged(world, names):
    layouts = Layouts(world)
    return {
        case: _case(layouts, TinyModel(fill(build())), _call(inputs))
        for name in names
        for case, (build, inputs) in CASES[name].items()
    }


def test_stages_of_each_class_give_what_one_process_gives_and_so_do_patches_with_keys_of_the_same_call():
    first, last = run_ranks(staged, 2, STAGED)
    assert [case for case, one in last.items() if one["masked"]] == ["qwen-image + text mask"]
    for case, one in last.items():
        assert max(one["whole"], first[case]["whole"]) <= EXACT, case
        if not one["masked"]:
            assert one["owned"] and one["patches"] <= EXACT < 1e-3 < one["other keys"], case


@torch.inference_mode()
def refused(world):
    """What ranks say of what stages do not know, none of which leaves another waiting."""
    layouts, said = Layouts(world), {}
    build, inputs = CASES["WanModel"]["wan2.1 t2v"]
    wan, call = TinyModel(fill(build())), _call(inputs)
    other = TinyModel(fill(CASES["Flux"]["flux1"][0]()))
    forward = make_module_forward(wan, layouts, Placement(TWO))
    patched = ModuleCall(call.args, call.kwargs | {ARGUMENT: {"together": False}}, ROWS, STAY)
    wan.live = lambda call: call if ARGUMENT not in call.kwargs else copy.copy(call)
    for name, action in {
        "another class": lambda: make_module_forward(other, layouts, Placement(TWO)),
        "tokens too": lambda: make_module_forward(
            wan, layouts, Placement(TWO.replace(pipefusion_degree=2, ulysses_degree=2))
        ),
        "a changed model": lambda: forward(patched),
    }.items():
        try:
            action()
        except Exception as error:
            said[name] = f"{type(error).__name__}: {error}"
    expected = wan.module(*copy.deepcopy(call.args), **copy.deepcopy(call.kwargs))
    said["after"] = _far(forward(call), expected, expected.abs().max())
    return said


def test_what_stages_do_not_know_is_refused_on_all_ranks_which_stay_usable():
    first, last = run_ranks(refused, 2)
    assert first == last and last["after"] <= EXACT
    assert "the blocks of Flux cannot be laid out over devices; set it to 1" in last["another class"]
    assert "the stages of WanModel do not share out tokens" in last["tokens too"]
    assert "nodes have changed the model" in last["a changed model"]
    assert all(words.startswith("RequestError") for name, words in last.items() if name != "after")
