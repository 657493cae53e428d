"""A test-only pack that fails in the way that its folder's name says. In rank 1, `parallel_test_breaks` cannot be
imported, `…_hangs` never finishes its import, `…_ends` ends the process and `…_raises` raises during a step."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch

WAY = Path(__file__).parent.name.removeprefix("parallel_test_")


def _is_rank_1() -> bool:
    return torch.distributed.is_initialized() and torch.distributed.get_rank() == 1


if WAY == "breaks" and _is_rank_1():
    raise ImportError("it needs a library that is not installed")
if WAY == "hangs" and _is_rank_1():
    time.sleep(3600)


def halved(apply, found):
    if WAY == "ends" and _is_rank_1():
        os._exit(3)
    if WAY == "raises" and _is_rank_1():
        raise RuntimeError("no such kernel for this device")
    return apply(found["input"], found["timestep"], **found["c"]) * 0.5


class Fails:
    INPUT_TYPES = classmethod(lambda cls: {"required": {"model": ("MODEL",)}})
    RETURN_TYPES, FUNCTION, CATEGORY = ("MODEL",), "apply", "parallel/testing"

    def apply(self, model):
        model = model.clone()
        model.set_model_unet_function_wrapper(halved)
        return (model,)


NODE_CLASS_MAPPINGS = {f"Test{WAY.capitalize()}": Fails}
