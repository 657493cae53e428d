"""Calls of ComfyUI's modules in tiny sizes, with the answer of one process. Ranks forked afterwards have them too."""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from host_and_device import on_device
from parallel_backend.engine.comm.groups import Layouts
from parallel_backend.engine.module_forward import make_module_forward
from parallel_backend.engine.stages.stale_keys import StaleKeyCache
from parallel_backend.engine.tokens.block_tokens import ImagePatch
from parallel_backend.models.comfyui.tiny.cases import TinyModel
from parallel_backend.models.comfyui.tiny.weights import fill
from parallel_backend.models.tokens.table import token_mode
from parallel_backend.requests import ModuleCall
from parallel_backend.sampling.image_patches import ElementPatches


class Reference:
    """A tiny model, a call of it and its answer in one process. `size`: (rows, latent height, latent width)."""

    def __init__(self, build, inputs, size, options=None):
        self.model = tiny_model(build)
        self.args, self.kwargs = inputs(*size)
        self.kwargs["transformer_options"] = dict(options or {})
        self.rows = size[0]
        self.answer = self.alone()

    @torch.inference_mode()
    def alone(self) -> Any:
        """Returns the answer of one process."""
        args, kwargs = copy.deepcopy((self.args, self.kwargs))
        return self.model.module(*args, **kwargs)

    @property
    def mode(self) -> str:
        return token_mode(type(self.model.module).__name__, self.kwargs)

    @torch.inference_mode()
    def difference(self, forward, tokens, *cache, prompts=()) -> float:
        """Returns the largest difference of the ranks' answer, relative to the largest value."""
        args, kwargs = on_device(copy.deepcopy((self.args, self.kwargs)))
        answer = forward(ModuleCall(args, kwargs, self.rows, tokens, prompts=prompts), *cache)
        pairs = zip(tensors_of(answer), on_device(tensors_of(self.answer)), strict=True)
        return max(((one - other).abs().max() / other.abs().max()).item() for one, other in pairs)

    def difference_and_bytes(self, forward, tokens) -> tuple[float, int]:
        """Returns that difference, and the bytes that this rank sent for the answer."""
        before = forward.bytes_sent
        return self.difference(forward, tokens), forward.bytes_sent - before

    def on_ranks(self, world, tokens, *placements) -> list[list[Any]]:
        """Returns for each placement [difference, bytes that this rank sent, notes of the forward]."""
        layouts, found = Layouts(world), []
        for placement in placements:
            forward = make_module_forward(self.model, layouts, placement)
            found.append([*self.difference_and_bytes(forward, tokens), forward.notes])
        return found


@functools.cache
def tiny_model(build):
    """Returns the model of this builder with random weights."""
    return TinyModel(fill(build()))


def alone(model: TinyModel, call: ModuleCall) -> Any:
    """Returns the answer of one process."""
    return model.module(*copy.deepcopy(call.args), **copy.deepcopy(call.kwargs))


def relative(one: Tensor, other: Tensor, largest: Tensor) -> float:
    return ((one - other).abs().max() / largest).item() if one.numel() else 0.0


def difference_of_patches(
    stages: Any,
    call: ModuleCall,
    keys: StaleKeyCache,
    split: ElementPatches,
    expected: Tensor,
    count: int,
    numbers: Sequence[int] = (),
) -> float:
    """Sends `count` image patches, or only these `numbers`, through stages; returns the largest relative difference."""
    far = [0.0]
    for number in numbers or range(count):
        one = stages.patch(copy.deepcopy(call), ImagePatch(number, count), keys)
        if one is not None:
            far.append(relative(split.take(one, number), split.take(expected, number), expected.abs().max()))
    stages.settle()
    return max(far)


def make_others(keys: StaleKeyCache) -> None:
    """Changes the stored keys, as another call would have done."""
    for held in keys.held.values():
        for tensor in held:
            tensor += 1.0


def tensors_of(answer: Any) -> list[Tensor]:
    return answer if isinstance(answer, (list, tuple)) else [answer]
