"""Values that decide something in Python are the first rank's where cards are unlike.

Two kinds of cards round differently, so that a cache's threshold or a sampler's step size may fall to one side here and
to the other there. As a job's code reads a number of a tensor, all ranks read the first one's.
"""

from __future__ import annotations

import struct
import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...engine.comm.groups import World
from .agreement import agree_on_call

# How Python reads a tensor's values.
_ARRAYS = ("numpy", "__array__")
_READS = ("item", "tolist", "__bool__", "__float__", "__int__", "__index__", *_ARRAYS)
_PACK = str(Path(__file__).parents[2])
_NUMBER = -(2**40)  # of the first read: no call of the network and no step has such a number


def are_unlike(world: World) -> bool:
    """True if not all ranks have the same kind of card. Collective."""
    if world.control is None:
        return False
    card = torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else "cpu"
    number = zlib.crc32(card.encode())
    words = torch.tensor([number, -number], dtype=torch.int64)
    dist.all_reduce(words, dist.ReduceOp.MAX, group=world.control)
    return words.tolist() != [number, -number]


@contextmanager
def first_ranks_values(world: World, same_on_all: Callable[[], bool]) -> Iterator[None]:
    """Inside, what code reads of a tensor is what the first rank reads there, as long as `same_on_all` says that all
    ranks compute the same. This package reads its own values. Raises RanksApart where ranks are at different lines."""
    stock = {name: getattr(Tensor, name) for name in _READS}
    owned = {name: Tensor.__dict__[name] for name in _READS if name in Tensor.__dict__}
    reads = 0

    def reading(name: str) -> Callable[..., Any]:
        def read(tensor: Tensor, *args: Any, **options: Any) -> Any:
            nonlocal reads
            caller = sys._getframe(1)
            if not same_on_all() or caller.f_code.co_filename.startswith((_PACK, torch.__path__[0])):
                return stock[name](tensor, *args, **options)
            reads += 1
            number, place = _NUMBER - reads, _place_of(caller)
            if name in _ARRAYS:
                if tensor.device.type == "cpu":  # an array shares its memory, which may be written to
                    tensor.detach().copy_(_first_ranks(world, tensor, number, place))
                return stock[name](tensor, *args, **options)
            if name == "tolist":
                return stock[name](_first_ranks(world, tensor, number, place))
            return _first_number(world, stock[name](tensor, *args), number, place)

        return read

    for name in _READS:
        setattr(Tensor, name, reading(name))
    try:
        yield
    finally:
        for name in _READS:
            if name in owned:
                setattr(Tensor, name, owned[name])
            else:
                delattr(Tensor, name)


def _place_of(frame: FrameType) -> int:
    """A number for a line of code, alike on all machines."""
    code = frame.f_code
    return zlib.crc32(f"{Path(code.co_filename).name} {code.co_name} {frame.f_lineno}".encode())


def _first_ranks(world: World, tensor: Tensor, number: int, place: int) -> Tensor:
    host = tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
    agree_on_call(world, False, number, place + host.nbytes)
    dist.broadcast(host.view(-1).view(torch.uint8), 0, group=world.control)
    return host


def _first_number(world: World, value: Any, number: int, place: int) -> Any:
    if isinstance(value, complex) or (isinstance(value, int) and not -(2**63) <= value < 2**63):
        return value
    form = "<d" if isinstance(value, float) else "<q"
    (bits,) = struct.unpack("<Q", struct.pack(form, value))
    bits = agree_on_call(world, False, number, place, bits)
    (found,) = struct.unpack(form, struct.pack("<Q", bits))
    return type(value)(found)
