"""Rebuilds a job of ComfyUI's process in a rank, around the objects that the rank holds.

The only module that reads pickles. They come from the ComfyUI that the rank serves, over the rank's control link.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .payload import HEAD, Head, ProcessFacts
from .reducers import RankObjects, find_object


def unpickle_job(data: bytes, here: RankObjects) -> tuple[Any, dict[int, Any]]:
    """Returns the pickled object, and the objects that it consists of, by number (see Pickled). Raises what its classes
    and the imports of its modules raise."""
    unpickler = _JobUnpickler(io.BytesIO(data), here)
    return unpickler.load(), unpickler.memo.copy()


class _JobUnpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, here: RankObjects) -> None:
        super().__init__(file)
        self._here = here
        self._made: dict[tuple[Any, ...], Tensor] = {}

    def persistent_load(self, pid: Any) -> Any:
        kind = pid[0]
        if kind == "context":
            return self._here
        if kind in ("tensor", "stored"):
            return self._tensor(*pid)
        if kind == "device":
            _, on_host, name = pid
            if name == "meta":
                return torch.device(name)
            return torch.device("cpu") if on_host else self._here.device
        return self._here.resolve(pid)

    def _tensor(self, kind: str, is_parameter: bool, on_host: bool, *place: Any) -> Tensor:
        if place not in self._made:
            found = self._here.stored(*place) if kind == "stored" else self._here.tensors[place[0]]
            if not on_host:
                found = found.to(self._here.device)
            self._made[place] = nn.Parameter(found, requires_grad=False) if is_parameter else found
        return self._made[place]

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        return find_object(self._here, module_name, global_name)


def unpack_facts(data: bytes) -> ProcessFacts:
    return ProcessFacts(*pickle.loads(data))


def unpack_payload(
    tensors: Mapping[str, Tensor], *, stay_shared: bool = False
) -> tuple[Head, dict[int, Tensor]]:
    """Returns the head, and the tensors by number. They are copies, so that the sender's memory, which all ranks share,
    can be freed. `stay_shared`: return the shared tensors instead, one copy for all ranks while any rank uses them."""
    head = Head(*pickle.loads(tensors[HEAD].numpy().tobytes()))
    found = {int(name): one for name, one in tensors.items() if name.isdecimal()}
    return head, {number: one if stay_shared else one.clone() for number, one in found.items()}
