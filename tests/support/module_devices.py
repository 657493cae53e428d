"""Calls of ComfyUI's tiny modules on a stand-in for a GPU (dispatch_counter.py), alone and as one of several ranks.

Arguments are placed as a rank places them. ComfyUI uses its attention function for GPUs and computes in bfloat16, as on
a GPU; on the CPU it would use float32, which hides a mix of dtypes. Needs `import_comfyui_here()`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar, Token
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from dispatch_counter import DEVICE, counted, world_of_one_process
from parallel_backend.engine.blocks.step_cache import ModuleCache
from parallel_backend.engine.comm.groups import Layouts
from parallel_backend.engine.module_forward import ModuleForward, make_module_forward
from parallel_backend.engine.stages.stale_keys import StaleKeyCache
from parallel_backend.engine.tokens.block_tokens import ImagePatch
from parallel_backend.models import attention
from parallel_backend.models.comfyui.tiny import cases, special_cases
from parallel_backend.models.comfyui.tiny.cases import Case, TinyModel
from parallel_backend.models.comfyui.tiny.weights import operations
from parallel_backend.requests import ModuleCall, Placement
from parallel_backend.strategy import ParallelStrategy

_DRAWS = ("rand", "normal_", "bernoulli", "uniform", "exponential")
HALF = torch.bfloat16
SIZE = (9, 7)  # latent height and width: tokens that two and three ranks do not divide


class _AttentionOfGpus:
    """Replaces the attention router's ContextVar: the original function is the one that ComfyUI chooses for a GPU."""

    def __init__(self, variable: ContextVar[Any]) -> None:
        self._variable = variable

    def get(self) -> attention.Replacement:
        from comfy.ldm.modules.attention import attention_pytorch

        def on_gpu(call: attention.AttentionCall) -> Tensor:
            return call.by(attention_pytorch)

        attend = self._variable.get()
        return lambda library, call: on_gpu(call) if attend is None else attend(on_gpu, call)

    def set(self, value: Any) -> Token[Any]:
        return self._variable.set(value)

    def reset(self, token: Token[Any]) -> None:
        self._variable.reset(token)


def _autocast(device_type: str, **options: Any) -> AbstractContextManager[Any]:
    return nullcontext() if device_type == DEVICE.type else torch.amp.autocast(device_type, **options)


@contextmanager
def comfyui_on_the_device() -> Iterator[None]:
    """Makes ComfyUI compute on the stand-in inside the block."""
    import comfy.model_management

    def memory(*device: Any, **named: Any) -> int:
        return 2**40

    asked = {"get_free_memory": memory, "get_total_memory": memory, "get_torch_device": lambda: DEVICE}
    with (
        patch.multiple(comfy.model_management, **asked),
        patch.object(torch, "autocast", _autocast),  # torch's refuses the meta device
        patch.object(attention, "_attend", _AttentionOfGpus(attention._attend)),
    ):
        yield


@dataclass
class Found:
    """The counts of a run. `syncs`: how often the host waited for the device; `own`: the lines of the pack that made it
    wait; `drawn`: draws of random numbers, which differ between kinds of cards for one seed; `answers`: its output."""

    syncs: int
    own: list[str]
    drawn: list[str]
    answers: list[Tensor]


_MADE_THERE = ("transformer_options", "control")  # ComfyUI makes their tensors on the model's device


def on_device(model: TinyModel) -> TinyModel:
    model.module.eval().requires_grad_(False).to(DEVICE)
    model.device = DEVICE
    return model


def as_in_a_rank(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Copies a call's arguments to the place where ComfyUI's BaseModel has them in a rank: on the device, except for
    tensors in dicts, which the modules move themselves."""

    def there(tensor: Tensor) -> Tensor:
        return tensor.to(DEVICE, copy=True)

    placed = {
        name: tree_map_only(Tensor, there, value)
        if name in _MADE_THERE or not isinstance(value, dict)
        else copy.deepcopy(value)
        for name, value in kwargs.items()
    }
    return tree_map_only(Tensor, there, args), placed


@contextmanager
def forward_of(model: TinyModel, strategy: ParallelStrategy, rank: int) -> Iterator[ModuleForward]:
    """Yields the forward of a rank whose collectives do nothing."""
    with world_of_one_process(rank, strategy.world_size) as world:
        yield make_module_forward(model, Layouts(world), Placement(strategy))


class Subject:
    """A tiny module on the stand-in, and calls of it."""

    def __init__(self, case: Case, rows: int = 1) -> None:
        build, inputs = case
        with _in_half():
            self.model = on_device(TinyModel(build()))
        for part in self.model.module.children():
            if type(part).__module__.startswith("parallel_backend."):  # replaces a module of ComfyUI's
                part.to(HALF)
        self._rows, self._inputs = rows, inputs
        self.name = type(self.model.module).__name__

    def call(self, tokens: str, prompts: tuple[int, ...] = ()) -> ModuleCall:
        """Returns a call with new arguments, placed as in a rank."""
        (latent, *times), kwargs = self._inputs(self._rows, *SIZE)
        control = {part: _halved(tensors) for part, tensors in kwargs.get("control", {}).items()}
        kwargs = {name: control if name == "control" else _halved(kwargs[name]) for name in kwargs}
        args, kwargs = as_in_a_rank((_halved(latent), *times), kwargs | {"transformer_options": {}})
        return ModuleCall(args, kwargs, self._rows, tokens, prompts=prompts)

    def alone(self) -> Found:
        """Calls the module as ComfyUI itself does."""
        call = self.call("")
        return watched(lambda: self.model.module(*call.args, **call.kwargs))

    def on_rank(self, strategy: ParallelStrategy, rank: int, tokens: str) -> Found:
        """Calls the module as this rank does."""
        with forward_of(self.model, strategy, rank) as forward:
            call = self.call(tokens)
            return watched(lambda: forward(call))

    def under_cache(self, strategy: ParallelStrategy, rank: int, tokens: str) -> list[Found]:
        """Runs a call that is computed, and one that skips blocks: its change reads as 1, below the threshold 2."""
        found = []
        with forward_of(self.model, strategy, rank) as forward:
            cache = ModuleCache(threshold=0.5)
            for cache.threshold in (0.5, 2.0):
                call = self.call(tokens, prompts=(0,))
                found.append(watched(lambda call=call: forward(call, cache)))
        assert (cache.calls, cache.reused) == (2, 1)
        return found

    def in_stages(self, strategy: ParallelStrategy, rank: int, tokens: str) -> dict[str, Found]:
        """Runs a call of whole images, the one query for the owners of patches, and a call of one patch."""
        with forward_of(self.model, strategy, rank) as forward:
            stages, keys = forward.stages, StaleKeyCache()
            assert stages is not None
            calls = [self.call(tokens) for _ in range(3)]
            found = {"whole": watched(lambda: forward(calls[0], keys=keys))}
            if not stages.flow_blocked_by(calls[1], keys):
                found["owners"] = watched(lambda: stages.owners(calls[1], 2, keys))
                found["patch"] = watched(lambda: stages.patch(calls[2], ImagePatch(1, 2), keys))
        return found


@contextmanager
def _in_half() -> Iterator[None]:
    """Builds tiny models inside the block as ComfyUI builds them for a GPU."""
    made = operations() | {"dtype": HALF}
    with (
        patch.object(cases, "operations", lambda: made),
        patch.object(special_cases, "operations", lambda: made),
    ):
        yield


def _halved(value: Any) -> Any:
    """Casts an argument as ComfyUI's BaseModel does: tensors and lists of them, but no tensor in a dict."""

    def half(tensor: Tensor) -> Tensor:
        return tensor.to(HALF) if tensor.is_floating_point() else tensor

    return tree_map_only(Tensor, half, value, is_leaf=lambda part: isinstance(part, dict))


def watched(run: Callable[[], Any]) -> Found:
    with torch.inference_mode(), comfyui_on_the_device(), counted() as counter:
        answer = run()
    drawn = [event for event in counter.events if any(word in event for word in _DRAWS)]
    tensors = [leaf for leaf in tree_leaves(answer) if isinstance(leaf, Tensor)]
    return Found(counter.counts.host_syncs, counter.own_syncs, drawn, tensors)
