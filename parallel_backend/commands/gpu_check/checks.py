"""A check and a group of checks, as data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ...wire.checks.findings import NO_GPU, Finding
from ...wire.checks.gpu_check import CheckSubject
from .ranks import Ranks

Examine = Callable[[Ranks], Sequence[Finding]]
USUAL_LIMIT = 600.0  # s; a model of 24 GB is loaded from a slow disk, and its blocks are compiled
ALL = 0  # ranks of a check: one on every device


@dataclass(frozen=True)
class Check:
    """One entry of the list. `name`: for --only; `examine`: what it does with ranks, None where ranks do it themselves
    (rank/checks), `ranks` of them together; `needs_gpu`, `needs_two`: else skipped, with the reason; `limit_s`:
    after which it is ended, and that is the finding."""

    name: str
    examine: Examine | None = None
    ranks: int = 1
    needs_gpu: bool = False
    needs_two: bool = False
    limit_s: float = USUAL_LIMIT

    def why_not(self, subject: CheckSubject) -> str:
        """The reason not to run it on `subject`, or empty."""
        if self.needs_gpu and not subject.on_gpus:
            return f"{NO_GPU}: this is about CUDA alone"
        if self.needs_two and len(subject.devices) < 2:
            return "one device: it takes two"
        return ""


@dataclass(frozen=True)
class Group:
    """Checks under one heading of the report."""

    title: str
    checks: tuple[Check, ...]
