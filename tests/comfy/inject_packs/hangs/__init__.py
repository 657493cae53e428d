"""A test-only pack that never ends its import in rank 1."""

from __future__ import annotations

import time

import torch

if torch.distributed.is_initialized() and torch.distributed.get_rank() == 1:
    time.sleep(3600)


def halved(apply, found):
    return apply(found["input"], found["timestep"], **found["c"]) * 0.5


class TestHangs:
    CATEGORY, FUNCTION, RETURN_TYPES = "parallel/testing", "apply", ("MODEL",)

    @classmethod
    def INPUT_TYPES(cls) -> dict:
        return {"required": {"model": ("MODEL",)}}

    def apply(self, model):
        model = model.clone()
        model.set_model_unet_function_wrapper(halved)
        return (model,)


NODE_CLASS_MAPPINGS = {"TestHangs": TestHangs}
