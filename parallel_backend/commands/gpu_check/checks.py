"""A check of the GPU check, as data."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ...devices import is_cpu
from ...wire.checks.findings import NO_GPU, CheckSubject, Finding
from .ranks import Ranks

Examine = Callable[[Ranks], Iterable[Finding]]
USUAL_LIMIT = 600.0  # s; enough to load 24 GB from a slow disk and to compile the blocks


@dataclass(frozen=True)
class Check:
    """One check. `name`: its name in --only; `examine`: the function that runs it; `needs_gpu`, `needs_two`: skipped
    without a GPU or without two devices; `limit_s`: seconds after which its jobs are ended and it is reported as
    broken."""

    name: str
    examine: Examine
    needs_gpu: bool = False
    needs_two: bool = False
    limit_s: float = USUAL_LIMIT

    def why_not(self, subject: CheckSubject) -> str:
        """Returns why the check cannot run on `subject`, or an empty string."""
        if self.needs_gpu and is_cpu(subject.devices):
            return f"{NO_GPU}: this is about CUDA alone"
        if self.needs_two and len(subject.devices) < 2:
            return "one device: it takes two"
        return ""
