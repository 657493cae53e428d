"""The record of a request that a rank ran, with notes for the user on what its forward did."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from ...options import SAME
from ...requests import Placement
from ...wire.protocol import RankRun

if TYPE_CHECKING:  # imported when they are first needed: they take seconds
    from ...engine.module_forward import ModuleForward


def run_record(forward: ModuleForward, placement: Placement, started: float, sent_before: int) -> RankRun:
    """Returns the record of a request that began at `started` (time.perf_counter), when `sent_before` bytes had been
    sent."""
    compiled, notes = None, [*forward.notes]
    wish = placement.compute_options.attention
    if wish not in ("auto", forward.kernel):
        notes.append(f"attention {wish} fell back to {forward.kernel}: {_why_other_kernel(forward)}")
    exchange = placement.compute_options.exchange_dtype
    if exchange != SAME and not forward.rounds:
        notes.append(f"exchange_dtype {exchange} had nothing to do: {_why_not_rounded(forward)}")
    if forward.compiles:
        from ...engine.blocks.compile import compiler

        notes += compiler().notes()
        compiled = compiler().take()
    return RankRun(
        engine=forward.engine,
        strategy=placement.strategy,
        seconds=time.perf_counter() - started,
        bytes_sent=forward.bytes_sent - sent_before,
        notes=tuple(notes),
        exact=forward.exact,
        kernel=forward.kernel,
        compiled=compiled,
    )


def _why_other_kernel(forward: ModuleForward) -> str:
    if forward.engine == "xfuser":
        return "engine xfuser does not have it"
    return "a ring merges by log-sum-exp, which it does not return, and only torch's own kernels take masks"


def _why_not_rounded(forward: ModuleForward) -> str:
    if forward.engine == "xfuser":
        return "engine xfuser sends as it computes"
    return "no tokens of the model's blocks were shared out by ulysses_degree or ring_degree"
