"""A test-only pack that cannot be imported in rank 1."""

from __future__ import annotations

import torch

if torch.distributed.is_initialized() and torch.distributed.get_rank() == 1:
    raise ImportError("it needs a library that is not installed")


def halved(apply, found):
    return apply(found["input"], found["timestep"], **found["c"]) * 0.5


class TestBreaks:
    CATEGORY, FUNCTION, RETURN_TYPES = "parallel/testing", "apply", ("MODEL",)

    @classmethod
    def INPUT_TYPES(cls) -> dict:
        return {"required": {"model": ("MODEL",)}}

    def apply(self, model):
        model = model.clone()
        model.set_model_unet_function_wrapper(halved)
        return (model,)


NODE_CLASS_MAPPINGS = {"TestBreaks": TestBreaks}
