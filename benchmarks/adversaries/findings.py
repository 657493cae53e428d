"""Findings of an adversary run, and the leaks of this process during the run."""

from __future__ import annotations

import os
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from forked_ranks import ForkedSubprocess
from parallel_backend.sidecar.group import supervisor
from parallel_backend.sidecar.group.supervisor import get_supervisor
from scripted import is_running, ranks_of

PATIENCE = 5.0  # s in which dying processes must end and the kernel must clean up


@dataclass
class Findings:
    """Counts of what a run found. `prompts` counts the attempts; every other count should be 0."""

    prompts: int = 0
    bare_errors: int = 0  # errors that name our internals instead of the input
    hangs: int = 0
    wrong: int = 0  # results that differ from what they should be
    leaks: int = 0  # descriptors, files, and memory that does not level off
    survivors: int = 0  # processes that outlived the run

    def add(self, kind: str, detail: str) -> None:
        setattr(self, kind, getattr(self, kind) + 1)
        print(f"  {kind}: {detail}"[:300], flush=True)

    @property
    def clean(self) -> bool:
        return not any(count for name, count in self.counts.items() if name != "prompts")

    @property
    def counts(self) -> dict[str, int]:
        return asdict(self)


@contextmanager
def quick_starts() -> Iterator[ForkedSubprocess]:
    """Makes ranks forks of a process that has torch loaded, inside the block and while the yielded object is `enabled`.
    Otherwise importing torch in some hundred ranks would take most of the time."""
    forked = ForkedSubprocess(supervisor)
    forked.prepare()
    supervisor.subprocess = forked
    try:
        yield forked
    finally:
        supervisor.subprocess = subprocess
        forked.close()


class Before:
    """A snapshot of this process's descriptors and of the files in /dev/shm; `compare` reports what was added since."""

    def __init__(self) -> None:
        get_supervisor()  # starts it now: it keeps a descriptor as long as this process lives
        self._descriptors, self._shared = _descriptors(), set(Path("/dev/shm").iterdir())

    def compare(self, findings: Findings, what: str) -> None:
        end = time.monotonic() + PATIENCE
        while (left := self._left()) != ([], [], []) and time.monotonic() < end:
            time.sleep(0.1)
        descriptors, shared, ranks = left
        for leak in (*descriptors, *shared):
            findings.add("leaks", f"{what}: {leak}")
        for pid in ranks:
            findings.add("survivors", f"{what}: the rank {pid}")

    def _left(self) -> tuple[list[str], list[str], list[int]]:
        more = _descriptors() - self._descriptors
        shared = set(Path("/dev/shm").iterdir()) - self._shared
        ranks = [pid for pid in ranks_of(os.getpid()) if is_running(pid)]
        return sorted(more.elements()), sorted(map(str, shared)), ranks


def _descriptors() -> Counter[str]:
    """Counts this process's descriptors by link target. Sockets and pipes have numbered targets and count by kind."""
    found: Counter[str] = Counter()
    for entry in Path("/proc/self/fd").iterdir():
        try:
            found[str(entry.readlink()).split(":[")[0]] += 1
        except OSError:  # the descriptor of this listing
            continue
    return found
