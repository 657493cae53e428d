"""Turns errors on a rank into the terminal message that the caller reads."""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from ...engine.comm.groups import Traffic
from ...errors import RANK_CRASHED, WIRE_ERRORS, DeviceError, ParallelError, RequestError
from ...wire.device_faults import DEVICE_ERROR, known_fault
from ...wire.protocol import PEER_FAILED, Failed

_CHARACTERS = 4000  # of the message, and of the end of the traceback; a datagram holds 64 KiB

# What torch and the modules raise for wrong shapes; einops raises a subclass of RuntimeError.
REFUSALS = (RuntimeError, ValueError, IndexError, AssertionError)


class PeerFailed(ParallelError):
    """Raised on a rank that could do its part, because another rank could not."""


# The text of torch's RuntimeErrors when memory runs out: "out of memory" from CUDA, HIP, NCCL's CUDA calls and
# pin_memory; a status from cuBLAS, cuDNN and cuSOLVER; the name of torch's CPU allocator.
_NO_MEMORY = re.compile(
    r"out of memory|ALLOC_FAILED|ALLOCATION_FAILED|cannot allocate memory|DefaultCPUAllocator", re.IGNORECASE
)


def is_out_of_memory(error: BaseException) -> bool:
    """Returns True if device or host memory ran out. Only torch's CUDA allocator has an error class of its own for it.
    Other errors are told by their text: some have the class that a failed device raises."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and _NO_MEMORY.search(str(error)) is not None


def is_device_failure(error: BaseException) -> bool:
    """Returns True if the device or the link to another rank failed, not the code. Some of these errors are plain
    RuntimeErrors, told by their text alone."""
    kinds = tuple(filter(None, (getattr(torch, "AcceleratorError", None), dist.DistError)))
    if isinstance(error, kinds):
        return True
    return isinstance(error, RuntimeError) and DEVICE_ERROR.search(str(error)) is not None


def is_fault(error: BaseException) -> bool:
    """Returns True if memory or a device failed, so the code is not to blame."""
    return is_out_of_memory(error) or is_device_failure(error)


@contextmanager
def refusing(module: str, traffic: Traffic) -> Iterator[None]:
    """Within this context, an error by which a ComfyUI module rejects its input becomes a RequestError, as long as this
    rank has started no collective: no rank waits for it, so the ranks stay usable if all raise the same. After a
    collective, and if the input is not at fault, errors stay unchanged."""
    before = traffic.collectives
    try:
        yield
    except REFUSALS as error:
        if traffic.collectives > before or is_fault(error):
            raise
        raise RequestError(
            f"{module} cannot compute with what it was given ({type(error).__name__}: {error}). The prompt, the latent "
            f"or something else that goes into it is likely of another model; the same graph without the parallel "
            f"nodes should say so too."
        ) from error


def as_refusal(error: Exception) -> ParallelError:
    """Returns a RequestError with the file and line that raised `error`; a ParallelError is returned unchanged."""
    if isinstance(error, ParallelError):
        return error
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    refusal = RequestError(f"The devices could not run this job: {type(error).__name__}: {error}{where}")
    refusal.__cause__ = error
    return refusal


def failure(error: Exception, rank: int, device: str) -> Failed:
    """Returns the terminal message for `error`."""
    if is_out_of_memory(error):
        kind = "OutOfMemory"
        message = (
            f"Process {rank} ran out of memory on {device} ({error}). Use a smaller image or batch, more devices, or "
            "weight_dtype float8_e4m3fn."
        )
    elif isinstance(error, PeerFailed):
        kind, message = PEER_FAILED, str(error)
    else:
        kind, message = type(error).__name__, str(error)
        if kind not in WIRE_ERRORS:
            kind, message = "RankFailed", f"{kind}: {message}"
        if kind == "RankFailed" and is_device_failure(error):
            fault = known_fault(message)
            if fault is not None:
                message = f"{fault.words}\n{message}"
            if fault is None or not fault.repeats:
                kind = RANK_CRASHED
    detail = "".join(traceback.format_exception(error))
    where = error.device if isinstance(error, DeviceError) else None
    return Failed(kind, message[:_CHARACTERS], detail[-_CHARACTERS:], where)
