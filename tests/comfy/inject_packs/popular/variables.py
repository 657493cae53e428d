"""A node that sets variables of its pack's modules, which its patch reads while the model samples."""

from __future__ import annotations

import threading

import torch
from comfy.ldm.modules import attention
from comfy.supported_models import GenmoMochi, SV3D_u

from . import modes
from .node import node


class Preset:
    """Settings that are looked up in another object if they were not set."""

    strength = 0.0

    def __init__(self) -> None:
        self.values: dict[str, float] = {}

    def __getattr__(self, name: str) -> float:
        return self.values.get(name, 0.0)


PRESET = Preset()
SCALES = {"output": [0.0]}
offset = 0.0
guard: threading.Lock | None = None


def _shift() -> float:
    return PRESET.bias + Preset.strength + SCALES["output"][0] + offset + modes.shift_of(modes.chosen)


@node("TestVariables", model="MODEL", value="FLOAT")
def variables(model, value):
    """Shifts the model's outputs by five times `value`, which it stores in five kinds of variables."""
    global offset
    model = model.clone()
    PRESET.values["bias"] = Preset.strength = SCALES["output"][0] = offset = value
    modes.chosen, modes.SHIFTS["chosen"] = "chosen", lambda: value

    def wrapper(apply_model, given):
        return apply_model(given["input"], given["timestep"], **given["c"]) + _shift()

    model.set_model_unet_function_wrapper(wrapper)
    return model


@node("TestLateVariables", model="MODEL", value="FLOAT")
def late_variables(model, value):
    """Like TestVariables, but with variables of a module that no other code imports."""
    from . import late

    model, shift_of = model.clone(), late.shift
    late.shift_by, late.SHIFTS["more"] = value, value

    def wrapper(apply_model, given):
        return apply_model(given["input"], given["timestep"], **given["c"]) + shift_of()

    model.set_model_unet_function_wrapper(wrapper)
    return model


@node("TestValuesOfComfyUI", model="MODEL", value="FLOAT")
def values_of_comfyui(model, value):
    """Shifts the model's outputs by three times `value`: it changes a value of a module of ComfyUI and of a class, and
    adds one to a class."""
    model = model.clone()
    attention.SDP_BATCH_LIMIT, GenmoMochi.memory_usage_factor, SV3D_u.shift_of_test = (
        2**31 + value,
        2.0 + value,
        value,
    )

    def wrapper(apply_model, given):
        shift = (
            attention.SDP_BATCH_LIMIT - 2**31 + GenmoMochi.memory_usage_factor - 2.0 + SV3D_u.shift_of_test
        )
        return apply_model(given["input"], given["timestep"], **given["c"]) + shift

    model.set_model_unet_function_wrapper(wrapper)
    return model


@node("TestFp16Accumulation", model="MODEL", on="BOOLEAN")
def fp16_accumulation(model, on):
    """Switches torch's accumulation in fp16 on or off, as KJNodes' loader does, and scales outputs while it is on."""
    matmul, model = torch.backends.cuda.matmul, model.clone()
    matmul.allow_fp16_accumulation = on

    def wrapper(apply_model, given):
        is_on = torch.backends.cuda.matmul.allow_fp16_accumulation
        return apply_model(given["input"], given["timestep"], **given["c"]) * (0.9 if is_on else 1.0)

    model.set_model_unet_function_wrapper(wrapper)
    return model


@node("TestLockedVariable", model="MODEL")
def locked_variable(model):
    """Sets a variable that cannot be sent to a rank, and scales the model's outputs if it is set."""
    global guard
    guard, model = threading.Lock(), model.clone()

    def wrapper(apply_model, given):
        return apply_model(given["input"], given["timestep"], **given["c"]) * (1.0 if guard is None else 0.9)

    model.set_model_unet_function_wrapper(wrapper)
    return model
