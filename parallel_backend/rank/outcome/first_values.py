"""Gives all ranks the first rank's values wherever a job's Python code reads a tensor, if the cards are unlike.

Two kinds of cards round differently, so a cache's threshold or a sampler's step size could decide differently on two
ranks. When a job's code reads a number from a tensor, all ranks read the first rank's.
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
from .agreement import RanksApart, agree_on_call

# The methods of Tensor by which Python reads values.
_ARRAYS = ("numpy", "__array__")
_READS = ("item", "tolist", "__bool__", "__float__", "__int__", "__index__", *_ARRAYS)
_PACK = str(Path(__file__).parents[2])
_NUMBER = -(2**40)  # read n has number _NUMBER - n, unlike any call of the network or step


def are_unlike(world: World) -> bool:
    """Returns True if not all ranks have the same kind of card. Collective."""
    card = torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else "cpu"
    try:
        agree_on_call(world, False, zlib.crc32(card.encode()), 0)
    except RanksApart:
        return True
    return False


@contextmanager
def first_ranks_values(world: World, same_on_all: Callable[[], bool]) -> Iterator[None]:
    """Within this context, code that reads a tensor gets the first rank's values, while `same_on_all` returns True: all
    ranks compute the same. This package and torch read their own values. Raises RanksApart if ranks read at different
    lines."""
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
                if tensor.device.type == "cpu":  # the array shares its memory, so write the values there
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
    """Returns a number for the line of code that `frame` runs, the same on all machines."""
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
