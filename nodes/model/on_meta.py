"""ComfyUI's models built without memory: their parameters on the meta device."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch.overrides import TorchFunctionMode

T = TypeVar("T")

META = torch.device("meta")
# Functions that make tensors of given values. Parameters are made by others (torch.empty and its like).
_OF_VALUES = {torch.tensor, torch.as_tensor, torch.arange, torch.linspace, torch.logspace}


class _ValuesOnHost(TorchFunctionMode):
    """A mode in which tensors of given values are made on the CPU instead of the meta device."""

    def __torch_function__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        given = dict(kwargs or {})
        device = given.get("device")
        if func in _OF_VALUES and device is not None and torch.device(device).type == "meta":
            given["device"] = "cpu"
        return func(*args, **given)


def build_on_meta(build: Callable[[torch.device], T]) -> T:
    """Calls `build` with the meta device. If a class computes with values while it is built, such as ACE-Step 1.5's
    codebook, this fails: then calls `build` again with these values on the CPU."""
    try:
        return build(META)
    except (RuntimeError, NotImplementedError):
        with _ValuesOnHost():
            return build(META)
