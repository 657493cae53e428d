"""Checks that cause faults on purpose: a job cancelled in a step, a rank killed, a device's memory used up."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence

from torch import Tensor

from ...errors import Cancelled, OutOfMemory
from ...requests import Placement
from ...wire.checks.findings import Finding
from .ranks import Ranks, compared

_KILLED = 20  # steps of the job whose rank is killed after the first: enough time for the kernel to do it
_LONG = 1000  # steps of the job that is cancelled in one of its first steps


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
    """Kills the last rank after the first step; the job must go on with new ranks and give the same latent."""
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
    """Lets rank 0 use up its memory (simulated on the CPU): the job must raise OutOfMemory, the next one must run."""
    strategy = ranks.split()
    expected = ranks.sample(strategy)
    sidecar = ranks.group(strategy.world_size, fresh=True)
    sidecar.check("fill memory", ranks.subject, ranks.seconds_left())
    before = sidecar.pids
    try:
        ranks.sample(strategy)
    except OutOfMemory as error:
        words = str(error).splitlines()[0][:200]
    else:
        remedy = "report it with the card and the driver"
        return [Finding("out of memory", "broken", "nothing failed, though all memory was taken", remedy)]
    result = ranks.sample(strategy)
    processes = "the same processes" if sidecar.pids == before else "new processes"
    return [compared("out of memory", result, expected, f"told ({words}); the next job on {processes}")]
