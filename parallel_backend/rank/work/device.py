"""The device of a rank, and its memory use, which the heartbeat publishes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn

from ...devices import local_name
from ...errors import DeviceError
from ...options import THREADS_ALONE
from ...wire.heartbeat import heartbeat

_PAGE = os.sysconf("SC_PAGE_SIZE")


def device_of(name: str) -> torch.device:
    """Returns torch's device; cpu:0, cpu:1, … are all torch's one CPU. Raises DeviceError if the device is gone."""
    device = torch.device("cpu" if name.startswith("cpu") else local_name(name))
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise DeviceError(
            f"{name} is not there: a process sees {torch.cuda.device_count()} GPUs. It may have failed (nvidia-smi, or "
            f"an Xid in the kernel's log), or CUDA_VISIBLE_DEVICES was changed. Take it out of the Strategy Selector's "
            f"devices, or restart ComfyUI.",
            device=name,
        )
    return device


class MemoryMeter:
    """Publishes memory and traffic of a rank. `bytes_sent`: returns the bytes sent to other ranks so far."""

    def __init__(self, device: torch.device, bytes_sent: Callable[[], int]) -> None:
        self._device = device
        self._bytes_sent = bytes_sent
        self._weights = 0

    def record_weights(self, chunks: Iterable[nn.Module]) -> None:
        """Counts the weights again after models came, went or moved. `chunks`: those of all held models."""
        self._weights = weight_bytes(chunks, self._device)
        self.publish()

    def publish(self) -> None:
        """Publishes the bytes of weights, traffic and other memory: torch's on a GPU; on the CPU, what maps no file."""
        if self._device.type == "cuda":
            working = max(0, torch.cuda.memory_allocated(self._device) - self._weights)
        else:
            resident, shared = Path("/proc/self/statm").read_text().split()[1:3]
            working = (int(resident) - int(shared)) * _PAGE
        heartbeat.holds(self._weights, working, self._bytes_sent())


def weight_bytes(chunks: Iterable[nn.Module], device: torch.device) -> int:
    """Returns the bytes of the weights on `device`. Weights that several chunks share count once."""
    parameters = {id(p): p for chunk in chunks for p in chunk.parameters()}
    here = (p for p in parameters.values() if p.device.type == device.type)
    # A placeholder for an absent weight has its shape, but only one number in memory.
    return sum(min(p.nbytes, p.untyped_storage().nbytes()) for p in here)


@contextmanager
def all_threads(device: torch.device) -> Iterator[None]:
    """Within this context, torch computes on the CPU with all the threads that a single rank would have."""
    alone = int(os.environ.get(THREADS_ALONE, "0"))
    before = torch.get_num_threads()
    if device.type != "cpu" or alone <= before:
        yield
        return
    torch.set_num_threads(alone)
    try:
        yield
    finally:
        torch.set_num_threads(before)
