"""A test-only pack that ends rank 1 as it computes there."""

from __future__ import annotations

import os

import torch


def halved(apply, found):
    if torch.distributed.is_initialized() and torch.distributed.get_rank() == 1:
        os._exit(3)
    return apply(found["input"], found["timestep"], **found["c"]) * 0.5


class TestEnds:
    CATEGORY, FUNCTION, RETURN_TYPES = "parallel/testing", "apply", ("MODEL",)

    @classmethod
    def INPUT_TYPES(cls) -> dict:
        return {"required": {"model": ("MODEL",)}}

    def apply(self, model):
        model = model.clone()
        model.set_model_unet_function_wrapper(halved)
        return (model,)


NODE_CLASS_MAPPINGS = {"TestEnds": TestEnds}
