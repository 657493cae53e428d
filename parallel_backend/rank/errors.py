"""Errors on a rank as the terminal message that the caller reads."""

from __future__ import annotations

import traceback

import torch
import torch.distributed as dist

from ..errors import RANK_CRASHED, DeviceError, ParallelError, to_wire
from ..wire.protocol import PEER_FAILED, Failed

_CHARACTERS = 4000  # of the message, and of the last traceback frames; a datagram holds 64 KiB


class PeerFailed(ParallelError):
    """This rank did its part, but gave it up because another rank could not do its own."""


def is_out_of_memory(error: BaseException) -> bool:
    """Device or host memory ran out. When the CPU allocator fails, torch raises a plain RuntimeError, which only its
    text tells from others."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)


def is_device_failure(error: BaseException) -> bool:
    """The device, or the link to another rank, failed under code that was right. Before torch 2.8 an error of CUDA is
    a plain RuntimeError, which only its text tells from others."""
    kinds = tuple(filter(None, (getattr(torch, "AcceleratorError", None), dist.DistError)))
    return isinstance(error, kinds) or (isinstance(error, RuntimeError) and "CUDA error" in str(error))


def failure(error: Exception, rank: int, device: str) -> Failed:
    """The terminal message for `error`."""
    if is_out_of_memory(error):
        kind = "OutOfMemory"
        message = (
            f"Rank {rank} ran out of memory on {device} ({error}). Use a smaller image or batch, more devices, or "
            "weight_dtype float8_e4m3fn."
        )
    elif isinstance(error, PeerFailed):
        kind, message = PEER_FAILED, str(error)
    else:
        kind, message = to_wire(error)
        if kind == "RankFailed" and is_device_failure(error):
            kind = RANK_CRASHED
    detail = "".join(traceback.format_exception(error))
    where = error.device if isinstance(error, DeviceError) else None
    return Failed(kind, message[:_CHARACTERS], detail[-_CHARACTERS:], where)
