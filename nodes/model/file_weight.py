"""Weights that only a file has: parameters on the meta device that refuse to be changed in place, which nobody would
see."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..host.calls import refusal

# Functions that end with an underscore and change no values.
_HARMLESS = {"detach_", "pin_memory_", "rename_", "requires_grad_", "retain_grad_", "share_memory_"}
# Python's own names of functions that do.
_WRITES = {
    "__setitem__",
    *(f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow")),
}


class _OfFile(Tensor):
    """A weight of a file, or a view of one."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = dict(kwargs or {})
        values = (*args, *given.values())
        written = given.get("out", next(iter(values), None) if _writes(func) else None)
        if isinstance(written, _OfFile):
            raise refusal(
                "a node that changes weights of the model's file in place",
                "put the node between a stock loader and Parallel Model",
            )
        with torch._C.DisableTorchFunctionSubclass():
            found = func(*args, **given)
            of_file = [one.untyped_storage()._cdata for one in values if isinstance(one, _OfFile)]
            return _mark_views(found, of_file)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        with torch._C.DisableTorchFunctionSubclass():
            copied = self.as_subclass(Tensor).clone()
        found = nn.Parameter(copied, requires_grad=False) if isinstance(self, nn.Parameter) else copied
        memo[id(self)] = found
        return found


class FileWeight(_OfFile, nn.Parameter):
    """A parameter whose values only a file has."""


def _writes(func: Callable[..., Any]) -> bool:
    name = func.__name__
    is_in_place = name.endswith("_") and not name.endswith("__") and name not in _HARMLESS
    return is_in_place or name in _WRITES or func == Tensor.data.__set__  # type: ignore[attr-defined]


def _mark_views(found: Any, storages: list[int]) -> Any:
    """Returns what a function gave, with views of tensors in `storages` marked as such."""
    if isinstance(found, (list, tuple)) and any(isinstance(one, Tensor) for one in found):
        return type(found)(_mark_views(one, storages) for one in found)
    is_new = isinstance(found, Tensor) and not isinstance(found, _OfFile)
    return found.as_subclass(_OfFile) if is_new and found.untyped_storage()._cdata in storages else found


def mark_weights(module: nn.Module) -> None:
    """Makes the parameters and buffers on the meta device of `module` and its children refuse changes in place."""
    for part in module.modules():
        for name, weight in part._parameters.items():
            if type(weight) is nn.Parameter and weight.is_meta:
                part._parameters[name] = FileWeight(weight.data, requires_grad=False)
        for name, buffer in part._buffers.items():
            if type(buffer) is Tensor and buffer.is_meta:
                part._buffers[name] = buffer.as_subclass(_OfFile)
