"""Injects faults for tests and benchmarks of failure handling; without the environment variable there are none.

`PARALLEL_SAMPLING_FAULT` holds a JSON object {"rank", "step", "kind", "point", "once"}: rank `rank` performs `kind`
when it reaches `point` after `step` steps of its request. Points are "start", "idle", "load", "step" and every
collective in heartbeat.py, just before it is entered. `once` names a file: a fault creates it when it fires, and does
nothing if it already exists.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

from ..heartbeat import Heartbeat
from ..strict_json import from_json, parse

VARIABLE = "PARALLEL_SAMPLING_FAULT"
HANG = 3600  # seconds, longer than any deadline
BUSY = 3.0  # seconds of processor time
_PIECE = 2**28  # bytes of one allocation on a device


@dataclass(frozen=True)
class Fault:
    """One fault, with the fields that the module's docstring explains."""

    rank: int
    step: int
    kind: str
    point: str
    once: str | None

    def __call__(self, point: str, step: int) -> None:
        if point != self.point or step != self.step:
            return
        if self.once is not None:
            try:
                Path(self.once).touch(exist_ok=False)
            except FileExistsError:
                return
        KINDS[self.kind]()


def arm(rank: int, heartbeat: Heartbeat) -> None:
    """Makes `heartbeat` trigger the fault in the environment if it is for this rank."""
    text = os.environ.get(VARIABLE)
    if not text:
        return
    fault = from_json(parse(text), Fault, VARIABLE)
    if fault.rank == rank:
        heartbeat.observer = fault


def _no_memory() -> None:
    import torch

    raise torch.OutOfMemoryError("a fault on purpose: tried to allocate 20.00 GiB")


def _fill_device() -> None:
    """Allocates all of this rank's GPU memory, then raises. On the CPU it only raises: other programs need that memory.
    It stops at the GPU's size, in case the driver would continue in host memory (WSL2's does)."""
    import torch

    allocated = []
    if torch.cuda.is_initialized():
        _, total = torch.cuda.mem_get_info()
        for _ in range(total // _PIECE):
            allocated.append(torch.empty(_PIECE, dtype=torch.uint8, device="cuda"))
    _no_memory()


def _exhaust() -> None:
    """Allocates host memory until the system ends the process."""
    allocated = []
    with contextlib.suppress(MemoryError):
        while True:
            allocated.append(b"x" * 2**24)
    time.sleep(HANG)


def _raise() -> None:
    raise RuntimeError("a fault on purpose")


def _compute() -> None:
    """Uses a processor for longer than a test's limit, then continues."""
    end = time.thread_time() + BUSY
    while time.thread_time() < end:
        pass


KINDS = {
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "segfault": lambda: ctypes.string_at(0),
    "abort": os.abort,
    "oom": _no_memory,
    "fill_device": _fill_device,
    "exhaust": _exhaust,
    "sleep": lambda: time.sleep(HANG),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "gil": lambda: ctypes.PyDLL(None).sleep(HANG),  # holds it
    "raise": _raise,
    "compute": _compute,
}
