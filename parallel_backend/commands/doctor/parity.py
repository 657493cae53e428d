"""Findings about the picture itself: the demo model on two ranks against one, and whether ranks start at all."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...wire.checks.findings import Finding

if TYPE_CHECKING:
    from torch import Tensor  # the doctor runs where there is none

# Largest difference of the latents relative to the largest value. fp32 is promised to 1e-5 and other orders of sums
# stay below 1e-4; bf16 has 8 bits, and a few steps multiply its rounding.
LIMITS = {"float32": 1e-4, "bfloat16": 0.1}


@dataclass(frozen=True)
class Parity:
    """One comparison. `difference`: largest, relative to the largest value of one rank's latent; nan if not finite."""

    dtype: str
    strategy: str
    difference: float


def largest_difference(latent: Tensor, expected: Tensor) -> float:
    """Returns it relative to the largest value of `expected`; nan where one of them is not finite."""
    return ((latent - expected).abs().max() / expected.abs().max()).item()


def check_parity(runs: Sequence[Parity]) -> Iterator[Finding]:
    """Yields a finding per dtype: the worst comparison where all are good, else every bad one."""
    for dtype in dict.fromkeys(run.dtype for run in runs):
        same = [run for run in runs if run.dtype == dtype]
        bad = [run for run in same if not run.difference <= LIMITS[dtype]]  # also what is not a number
        for run in bad:
            yield Finding(
                "same latent",
                "broken",
                f"{run.strategy} against one device, {dtype}: largest difference {run.difference:.1e} of the "
                f"largest value, where {LIMITS[dtype]:.0e} is rounding: pictures would differ",
                "look at the lines above for data that arrives altered or a kernel that does not work; else "
                "report it with this text, and use one device until then",
            )
        if not bad:
            names, worst = ", ".join(run.strategy for run in same), max(run.difference for run in same)
            words = (
                f"{names} against one device, {dtype}: largest difference {worst:.1e} of the largest value"
            )
            yield Finding("same latent", "ok", words)


def failed_start(devices: int, cause: str) -> Finding:
    """The ranks could not start, or ended while they were examined."""
    return Finding(
        "processes",
        "broken",
        f"a group of {devices} processes does not work: {cause}",
        "the last lines of the cause say what is missing; `broken` lines above often explain it",
    )
