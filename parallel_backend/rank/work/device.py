"""The device of a rank: found by its name, and what lies on it for the heartbeat to tell."""

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
    """cpu:0, cpu:1, … name ranks; to torch there is one CPU. Raises DeviceError for a device that has gone."""
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
    """`bytes_sent`: to other ranks so far, as a function."""

    def __init__(self, device: torch.device, bytes_sent: Callable[[], int]) -> None:
        self._device = device
        self._bytes_sent = bytes_sent
        self._weights = 0

    def record_weights(self, chunks: Iterable[nn.Module]) -> None:
        """The models that are held are others, or lie elsewhere; `chunks`: of all of them."""
        self._weights = weight_bytes(chunks, self._device)
        self.publish()

    def publish(self) -> None:
        """Memory beside the weights is what torch allocated on an accelerator, and on the CPU what is no file's."""
        if self._device.type == "cuda":
            working = max(0, torch.cuda.memory_allocated(self._device) - self._weights)
        else:
            resident, shared = Path("/proc/self/statm").read_text().split()[1:3]
            working = (int(resident) - int(shared)) * _PAGE
        heartbeat.holds(self._weights, working, self._bytes_sent())


def weight_bytes(chunks: Iterable[nn.Module], device: torch.device) -> int:
    """Of weights on `device`. Chunks of one rank share some."""
    parameters = {id(p): p for chunk in chunks for p in chunk.parameters()}
    return sum(_local_bytes(p, device) for p in parameters.values())


def _local_bytes(parameter: nn.Parameter, device: torch.device) -> int:
    local = parameter.to_local() if hasattr(parameter, "to_local") else parameter  # a shard's own rows
    # What stands for an absent weight has its shape, and one number in memory.
    taken = min(local.nbytes, local.untyped_storage().nbytes())
    return taken if local.device.type == device.type else 0


@contextmanager
def all_threads(device: torch.device) -> Iterator[None]:
    """Inside, torch computes on the CPU with as many threads as a rank has that is not one of several."""
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
