"""The record of a request that a rank ran, with notes for the user on what its forward did."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from ...options import SAME
from ...requests import Placement, RunInfo
from .step_boundary import StepBoundary

if TYPE_CHECKING:  # imported when they are first needed: they take seconds
    from ...engine.module_forward import ModuleForward


def run_record(
    forward: ModuleForward,
    placement: Placement,
    sent_before: int,
    on_step: StepBoundary,
    notes_of_job: Iterable[str],
    *,
    is_exact: bool,
) -> RunInfo:
    """Returns the record of a job that began when `sent_before` bytes had been sent, and whose own part `is_exact`."""
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
    return RunInfo(
        engine=forward.engine,
        strategy=placement.strategy,
        bytes_sent=(forward.bytes_sent - sent_before,),
        notes=(*notes, *notes_of_job),
        exact=forward.exact and is_exact,
        inside_seconds=(on_step.inside_seconds,),
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
