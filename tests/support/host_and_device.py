"""Separates host and device memory on the CPU: `torch.device("cpu", 0)` stands for a device, "cpu" for the host.

Inside a HostAndDevice a tensor is on the device if it was made there, sent there, or computed from tensors there. A
computation with tensors of both raises an error, as with CUDA. Only `tensor.device` and the stand-in for NCCL show a
difference: memory and kernels are the CPU's.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

HOST, DEVICE = torch.device("cpu"), torch.device("cpu", 0)
# Functions whose result is on the device that they name, or on the device of their second argument.
_MOVES = {"to", "cpu", "type_as"}
# Functions that take host and device tensors at the same time: copies, and indices.
_MIXES = {*_MOVES, "copy_", "__getitem__", "__setitem__", "index_put_"}
_MIXES |= {"_has_compatible_shallow_copy_type", "__set__"}  # nn.Module.to calls these

_entered: list[HostAndDevice] = []


class HostAndDevice(TorchFunctionMode):
    """Tracks which tensors are on the device, in the thread that enters it."""

    def __init__(self) -> None:
        super().__init__()
        self._there: dict[int, StorageWeakRef] = {}

    def __enter__(self) -> HostAndDevice:
        _entered.append(self)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        _entered.remove(self)

    def put(self, *modules: nn.Module) -> None:
        """Marks the weights of modules as being on the device, without a copy."""
        for module in modules:
            for tensor in (*module.parameters(), *module.buffers()):
                self._mark(tensor)

    def holds(self, tensor: Tensor) -> bool:
        """Returns True if a tensor is on the device. A tensor without memory (meta) is not."""
        found = self._there.get(tensor.untyped_storage()._cdata)
        return found is not None and not found.expired()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "__get__":
            found = func(*args, **kwargs)
            return (
                DEVICE if found == HOST and func == Tensor.device.__get__ and self.holds(args[0]) else found
            )
        inputs = _tensors((*args, *kwargs.values()))
        is_there = any(map(self.holds, inputs))
        if is_there and name not in _MIXES and not all(one.ndim == 0 or self.holds(one) for one in inputs):
            raise RuntimeError(f"{name}: expected all tensors to be on the same device")
        place = self._place(name, args, kwargs)
        out, known = func(*args, **kwargs), {one.untyped_storage()._cdata for one in inputs}
        if name in _MOVES and place not in (None, self._device_of(args[0])):
            known, out = set(), out.clone() if out.untyped_storage()._cdata in known else out
        if is_there if place is None else place == DEVICE:
            for tensor in _tensors([out]):
                if tensor.untyped_storage()._cdata not in known:
                    self._mark(tensor)
        return out

    def _device_of(self, tensor: Tensor) -> torch.device:
        return DEVICE if self.holds(tensor) else HOST

    def _place(self, name: str, args: Any, kwargs: Any) -> torch.device | None:
        """Returns the device that a call names, or None."""
        if name == "cpu":
            return HOST
        if name in _MOVES and len(args) > 1 and isinstance(args[1], Tensor):
            return self._device_of(args[1])
        named = [kwargs.get("device"), *(args[1:] if name == "to" else ())]
        return next((torch.device(one) for one in named if isinstance(one, (torch.device, str))), None)

    def _mark(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        self._there[storage._cdata] = StorageWeakRef(storage)


def _tensors(values: Iterable[Any]) -> list[Tensor]:
    """Returns the tensors in values. torch's tree_leaves would take a third of the time of a test."""
    found = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (tuple, list)):
            found += _tensors(value)
        elif isinstance(value, dict):
            found += _tensors(value.values())
    return found


def active() -> HostAndDevice | None:
    """Returns the one entered last. (torch's stack of modes is empty inside its functions, such as collectives.)"""
    return _entered[-1] if _entered else None


def on_device(value: Any) -> Any:
    """Returns `value` with its tensors on the device, or unchanged outside a HostAndDevice."""
    return value if active() is None else tree_map_only(Tensor, lambda tensor: tensor.to(DEVICE), value)
