"""Faults that ranks cause in themselves (options.FAULT; fault_injection.fault sets it).

A fault is a JSON object {"rank", "step", "kind", "point", "once"}: rank `rank` performs `kind` when it reaches `point`
after `step` steps of its request. Points are "start", "idle", "load", "encode", "step" and every collective in
heartbeat.py, just before it is entered. `once` names a file: a fault creates it when it fires, and does nothing if it
already exists.
"""

import contextlib
import ctypes
import json
import os
import signal
import time
from pathlib import Path

import torch

HANG = 3600  # seconds, longer than any deadline
BUSY = 3.0  # seconds of processor time


def arm(text, own_rank, heartbeat):
    """Makes `heartbeat` trigger the fault if it is for this rank."""

    def meet(reached, steps):
        if reached != fault["point"] or steps != fault["step"]:
            return
        if fault["once"] is not None:
            try:
                Path(fault["once"]).touch(exist_ok=False)
            except FileExistsError:
                return
        KINDS[fault["kind"]]()

    fault = json.loads(text)
    if fault["rank"] == own_rank:
        heartbeat.observer = meet


def _no_memory():
    raise torch.OutOfMemoryError("a fault on purpose: tried to allocate 20.00 GiB")


def _exhaust():
    """Allocates host memory until the system ends the process."""
    allocated = []
    with contextlib.suppress(MemoryError):
        while True:
            allocated.append(b"x" * 2**24)
    time.sleep(HANG)


def _raise():
    raise RuntimeError("a fault on purpose")


def _compute():
    """Uses a processor for longer than a test's limit, then continues."""
    end = time.thread_time() + BUSY
    while time.thread_time() < end:
        pass


KINDS = {
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "segfault": lambda: ctypes.string_at(0),
    "abort": os.abort,
    "oom": _no_memory,
    "exhaust": _exhaust,
    "sleep": lambda: time.sleep(HANG),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "gil": lambda: ctypes.PyDLL(None).sleep(HANG),  # holds it
    "raise": _raise,
    "compute": _compute,
}
