"""Host memory and a device's told apart on the CPU: `torch.device("cpu", 0)` stands for a device, "cpu" for the host.

Inside a HostAndDevice a tensor is on the device if it was made there or sent there, or computed from what is. What CUDA
refuses raises: to compute with tensors of both. Only `tensor.device` and the stand-in for NCCL see a difference: memory
and kernels are the CPU's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

HOST, DEVICE = torch.device("cpu"), torch.device("cpu", 0)
# Give a tensor that is where they say, or where their second argument is.
_MOVES = {"to", "cpu", "type_as"}
# Take tensors of the host beside a device's: what is copied, and numbers of elements.
_MIXES = {*_MOVES, "copy_", "__getitem__", "__setitem__", "index_put_"}
_MIXES |= {"_has_compatible_shallow_copy_type", "__set__"}  # a module's own way to another device

_entered: list[HostAndDevice] = []


class HostAndDevice(TorchFunctionMode):
    """Within the thread that enters it."""

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
        """Has the weights of modules on the device without a copy."""
        for module in modules:
            for tensor in (*module.parameters(), *module.buffers()):
                self._mark(tensor)

    def holds(self, tensor: Tensor) -> bool:
        """Whether a tensor is on the device; one without memory (meta) is not."""
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
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        is_there = any(map(self.holds, inputs))
        if is_there and name not in _MIXES and not all(one.ndim == 0 or self.holds(one) for one in inputs):
            raise RuntimeError(f"{name}: expected all tensors to be on the same device")
        place = self._place(name, args, kwargs)
        out, known = func(*args, **kwargs), {one.untyped_storage()._cdata for one in inputs}
        if name in _MOVES and place not in (None, self._device_of(args[0])):
            known, out = set(), out.clone() if out.untyped_storage()._cdata in known else out
        if is_there if place is None else place == DEVICE:
            for leaf in tree_leaves(out):
                if isinstance(leaf, Tensor) and leaf.untyped_storage()._cdata not in known:
                    self._mark(leaf)
        return out

    def _device_of(self, tensor: Tensor) -> torch.device:
        return DEVICE if self.holds(tensor) else HOST

    def _place(self, name: str, args: Any, kwargs: Any) -> torch.device | None:
        """The device that a call names."""
        if name == "cpu":
            return HOST
        if name in _MOVES and len(args) > 1 and isinstance(args[1], Tensor):
            return self._device_of(args[1])
        named = [kwargs.get("device"), *(args[1:] if name == "to" else ())]
        return next((torch.device(one) for one in named if isinstance(one, (torch.device, str))), None)

    def _mark(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        self._there[storage._cdata] = StorageWeakRef(storage)


def active() -> HostAndDevice | None:
    """The one that was entered last. (torch's stack of them is empty inside of its functions, as collectives are.)"""
    return _entered[-1] if _entered else None


def on_device(value: Any) -> Any:
    """The same with its tensors on the device, where there is one."""
    return value if active() is None else tree_map_only(Tensor, lambda tensor: tensor.to(DEVICE), value)
