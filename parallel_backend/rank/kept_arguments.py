"""The arguments of model calls on a rank's device, and those kept from call to call (sidecar/tensor_cache.py)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..models.comfyui.calls import in_host_memory
from ..models.comfyui.patches import ARGUMENT
from ..wire.arguments import map_tensors, take_kept, unpack_arguments
from ..wire.payloads import Tensors

_HOST = torch.device("cpu")


class KeptArguments:
    """Tensors by the parent's keys.

    Every call gets copies: modules may write into them, and what arrived lies in memory that the parent writes again
    with the next call. On the CPU the copies of one call lie where those of the last one lay: memory that is new costs
    more than the copy (docs/benchmarks.md). Whatever outlives a call keeps copies of its own (run_memory.py).
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._kept: dict[int, Tensor] = {}
        self._lent: list[Tensor] = []  # to the latest call

    def clear(self) -> None:
        self._kept.clear()
        self._lent.clear()

    def take(self, tensors: Tensors, forget: tuple[int, ...]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """(args, kwargs) of a call's payload on the device, until the next call; what it brings to be kept is.
        `forget`: keys that are not used again. Raises TransportError for a payload that is none."""
        left = dict(tensors)
        for key in forget:
            self._kept.pop(key, None)
        arrived = take_kept(left)
        args, kwargs = unpack_arguments(left, self._kept | arrived)
        on_host = set(map(id, in_host_memory(kwargs)))

        def device_of(tensor: Tensor) -> torch.device:
            return _HOST if id(tensor) in on_host else self._device

        self._kept |= {key: tensor.to(device_of(tensor), copy=True) for key, tensor in arrived.items()}
        patches = kwargs.pop(ARGUMENT, None)
        free, self._lent = self._lent, []

        def lend(tensor: Tensor) -> Tensor:
            if self._device != _HOST:  # whose allocator does as much
                return tensor.to(device_of(tensor), copy=True)
            wanted = (tensor.dtype, tensor.shape)
            place = next((n for n, one in enumerate(free) if (one.dtype, one.shape) == wanted), None)
            own = tensor.clone() if place is None else free.pop(place).copy_(tensor)
            self._lent.append(own)
            return own

        args, kwargs = map_tensors((args, kwargs), lend)
        if patches is not None:  # a ControlNet's weights: they are read, and as large as a model
            kept = {id(tensor): tensor for tensor in self._kept.values()}
            kept |= {id(tensor): self._kept[key] for key, tensor in arrived.items()}
            kwargs[ARGUMENT] = map_tensors(
                patches, lambda one: kept[id(one)] if id(one) in kept else lend(one)
            )
        return args, kwargs
