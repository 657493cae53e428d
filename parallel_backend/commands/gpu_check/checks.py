"""A check of the GPU check, as data."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ...wire.checks.findings import NO_GPU, Finding
from ...wire.checks.gpu_check import CheckSubject
from .ranks import Ranks

Examine = Callable[[Ranks], Iterable[Finding]]
USUAL_LIMIT = 600.0  # s; enough to load 24 GB from a slow disk and to compile the blocks
ALL = sys.maxsize  # Check.ranks: one rank on every device


@dataclass(frozen=True)
class Check:
    """One check. `name`: its name in --only; `examine`: the function that runs it with a Ranks object; None for a check
    that `ranks` rank processes, at most one on each device, run together (rank/checks); `needs_gpu`, `needs_two`:
    skipped without a GPU or without two devices; `limit_s`: seconds after which it is ended and reported as broken."""

    name: str
    examine: Examine | None = None
    ranks: int = 1
    needs_gpu: bool = False
    needs_two: bool = False
    limit_s: float = USUAL_LIMIT

    def why_not(self, subject: CheckSubject) -> str:
        """Returns why the check cannot run on `subject`, or an empty string."""
        if self.needs_gpu and not subject.on_gpus:
            return f"{NO_GPU}: this is about CUDA alone"
        if self.needs_two and len(subject.devices) < 2:
            return "one device: it takes two"
        return ""

    def count(self, subject: CheckSubject) -> int:
        """Returns the number of processes that run the check."""
        return min(self.ranks, len(subject.devices)) if self.examine is None else 1
