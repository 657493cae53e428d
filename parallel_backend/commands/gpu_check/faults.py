"""Checks of what goes wrong on purpose: a job cancelled in a step, a rank killed, a device's memory used up."""

from __future__ import annotations

import json
import os
import signal
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from torch import Tensor

from ...errors import Cancelled, OutOfMemory
from ...requests import Placement
from ...wire.checks.fault_injection import VARIABLE
from ...wire.checks.findings import Finding
from .checks import Check, Group
from .ranks import Ranks, compared

_KILLED = 20  # steps of a job in whose first one a rank is killed: enough for the kernel to do it
_LONG = 1000  # steps of a job that is cancelled in its first ones


def check_cancel(ranks: Ranks) -> Sequence[Finding]:
    strategy = ranks.split()
    expected = ranks.sample(strategy)
    sidecar = ranks.group(strategy.world_size)
    before, began = sidecar.pids, 0.0

    def on_step(step: int, steps: int, denoised: Tensor | None) -> None:
        nonlocal began
        began = began or time.monotonic()

    try:
        sidecar.sample(
            ranks.spec,
            ranks.request(steps=_LONG),
            Placement(strategy),
            on_step,
            should_cancel=lambda: began > 0,
        )
    except Cancelled:
        words = f"{strategy.describe()}: ended {time.monotonic() - began:.2f} s after it was asked to"
    else:
        return [Finding("cancel", "skipped", f"{_LONG} steps were over before they could be cancelled")]
    if sidecar.pids != before:
        remedy = "report it: processes that are cancelled stay warm"
        return [Finding("cancel", "slow", f"{words}, and the processes had to be started again", remedy)]
    return [
        compared("cancel", ranks.sample(strategy), expected, f"{words}; the next job on the same processes")
    ]


def check_kill(ranks: Ranks) -> Sequence[Finding]:
    """The last rank is killed after the first step; the job goes on with new ranks, and comes to the same."""
    strategy = ranks.split()
    expected = ranks.sample(strategy, steps=_KILLED)
    sidecar = ranks.group(strategy.world_size)
    killed: list[int] = []

    def on_step(step: int, steps: int, denoised: Tensor | None) -> None:
        if not killed:
            killed.append(sidecar.pids[-1])
            os.kill(killed[0], signal.SIGKILL)

    began = time.monotonic()
    result = ranks.sample(strategy, steps=_KILLED, on_step=on_step)
    words = (
        f"{strategy.describe()}: killed after a step, done {time.monotonic() - began:.1f} s after its begin"
    )
    return [compared("killed process", result, expected, words)]


def check_out_of_memory(ranks: Ranks) -> Sequence[Finding]:
    """Rank 0 allocates until nothing is left (on the CPU it only says so); the job fails in words, the next runs."""
    strategy = ranks.split()
    expected = ranks.sample(strategy)
    with tempfile.TemporaryDirectory(prefix="parallel-doctor-") as folder, _fault(Path(folder) / "once"):
        sidecar = ranks.group(strategy.world_size, fresh=True)
        sidecar.start()
        before = sidecar.pids
        try:
            ranks.sample(strategy)
        except OutOfMemory as error:
            words = str(error).splitlines()[0][:200]
        else:
            remedy = "report it with the card and the driver"
            return [Finding("out of memory", "broken", "nothing failed, though all memory was taken", remedy)]
        result = ranks.sample(strategy)
        after = sidecar.pids
    kept = "the same processes" if after == before else "new processes"
    ranks.close()  # they still have the fault in their environment
    return [compared("out of memory", result, expected, f"told ({words}); the next job on {kept}")]


@contextmanager
def _fault(once: Path) -> Iterator[None]:
    """Ranks that start now run out of memory after one step, once."""
    fault = {"rank": 0, "step": 1, "kind": "fill_device", "point": "step", "once": str(once)}
    os.environ[VARIABLE] = json.dumps(fault)
    try:
        yield
    finally:
        del os.environ[VARIABLE]


FAULTS = Group(
    "Faults",
    (
        Check("cancel", check_cancel),
        Check("kill", check_kill),
        Check("out of memory", check_out_of_memory),
    ),
)
