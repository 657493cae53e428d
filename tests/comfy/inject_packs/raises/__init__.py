"""A test-only pack that raises an error in rank 1 while it computes."""

from __future__ import annotations

import torch


def halved(apply, found):
    if torch.distributed.is_initialized() and torch.distributed.get_rank() == 1:
        raise RuntimeError("no such kernel for this device")
    return apply(found["input"], found["timestep"], **found["c"]) * 0.5


class TestRaises:
    CATEGORY, FUNCTION, RETURN_TYPES = "parallel/testing", "apply", ("MODEL",)

    @classmethod
    def INPUT_TYPES(cls) -> dict:
        return {"required": {"model": ("MODEL",)}}

    def apply(self, model):
        model = model.clone()
        model.set_model_unet_function_wrapper(halved)
        return (model,)


NODE_CLASS_MAPPINGS = {"TestRaises": TestRaises}
