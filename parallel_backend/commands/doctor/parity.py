"""Findings about the picture: the demo model's latent on two ranks against one, and ranks that fail to start."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...wire.checks.findings import Finding

if TYPE_CHECKING:
    from torch import Tensor  # the doctor also runs without torch

# Largest allowed difference of the latents, relative to the largest value. fp32 promises 1e-5, and another order of
# sums stays below 1e-4. bf16 has 8 bits, and its rounding grows over a few steps.
LIMITS = {"float32": 1e-4, "bfloat16": 0.1}


@dataclass(frozen=True)
class Parity:
    """One comparison with one rank's latent. `difference`: see largest_difference."""

    dtype: str
    strategy: str
    difference: float


def largest_difference(latent: Tensor, expected: Tensor) -> float:
    """Returns the largest difference relative to the largest value of `expected`; inf or nan if one is not finite."""
    return ((latent - expected).abs().max() / expected.abs().max()).item()


def check_parity(runs: Sequence[Parity]) -> Iterator[Finding]:
    """Yields findings per dtype: one with the worst comparison if all are good, else one for each bad comparison."""
    for dtype in dict.fromkeys(run.dtype for run in runs):
        same = [run for run in runs if run.dtype == dtype]
        bad = [run for run in same if not run.difference <= LIMITS[dtype]]  # also true for nan
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
    """Returns the finding for ranks that could not start, or that ended during the examination."""
    return Finding(
        "processes",
        "broken",
        f"a group of {devices} processes does not work: {cause}",
        "the last lines of the cause say what is missing; `broken` lines above often explain it",
    )
