"""What a run of an adversary found, and what a process had before and after it."""

from __future__ import annotations

import os
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from parallel_backend.sidecar.supervisor import get_supervisor
from scripted import is_running, ranks_of

PATIENCE = 5.0  # s that dying processes and the kernel get


@dataclass
class Findings:
    """`prompts`: things tried; of the rest none should be. `details`: a line for each finding."""

    prompts: int = 0
    bare_errors: int = 0  # that name our insides instead of the input
    hangs: int = 0
    wrong: int = 0  # results that differ from what they should be
    leaks: int = 0  # descriptors, files, and memory that does not level off
    survivors: int = 0  # processes
    details: list[str] = field(default_factory=list)

    def add(self, kind: str, detail: str) -> None:
        setattr(self, kind, getattr(self, kind) + 1)
        self.details.append(f"{kind}: {detail}"[:300])
        print(f"  {self.details[-1]}", flush=True)

    @property
    def clean(self) -> bool:
        return not (self.bare_errors or self.hangs or self.wrong or self.leaks or self.survivors)


class Before:
    """The descriptors and shared memory of this process; `compare` reports what came to stay."""

    def __init__(self) -> None:
        get_supervisor()  # lasts as long as the process, with its own descriptor
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
    """What they lead to; sockets and pipes have numbers of their own and count by kind."""
    found: Counter[str] = Counter()
    for entry in Path("/proc/self/fd").iterdir():
        try:
            found[str(entry.readlink()).split(":[")[0]] += 1
        except OSError:  # the listing's own
            continue
    return found
