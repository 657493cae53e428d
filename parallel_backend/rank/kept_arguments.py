"""The arguments of model calls on a rank's device, and those kept from call to call (sidecar/tensor_cache.py)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..models.comfyui.patches import ARGUMENT
from ..wire.arguments import map_tensors, take_kept, unpack_arguments
from ..wire.payloads import Tensors


class KeptArguments:
    """Tensors by the parent's keys."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._kept: dict[int, Tensor] = {}

    def clear(self) -> None:
        self._kept.clear()

    def take(self, tensors: Tensors, forget: tuple[int, ...]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """(args, kwargs) of a call's payload on the device; what it brings to be kept is. `forget`: keys that are not
        used again. Raises TransportError for a payload that is none."""
        left = dict(tensors)
        for key in forget:
            self._kept.pop(key, None)
        for key, tensor in take_kept(left).items():
            self._kept[key] = self._own(tensor)
        args, kwargs = unpack_arguments(left, self._kept)
        patches = kwargs.pop(ARGUMENT, None)
        args, kwargs = map_tensors((args, kwargs), self._own)  # modules may write into them
        if patches is not None:  # a ControlNet's weights: they are read, and as large as a model
            kept = {id(tensor) for tensor in self._kept.values()}
            kwargs[ARGUMENT] = map_tensors(patches, lambda one: one if id(one) in kept else self._own(one))
        return args, kwargs

    def _own(self, tensor: Tensor) -> Tensor:
        """A copy, for what arrived lies in memory that the parent writes again with the next call."""
        return tensor.to(self._device, copy=True)
