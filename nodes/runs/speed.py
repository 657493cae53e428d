"""Compares a run with one device: one step time for a run, one sentence for every panel, badge, table and report."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from statistics import mean, median
from typing import TYPE_CHECKING

from ...parallel_backend.observability.prompt_phases import PHASES
from ...parallel_backend.planner.step_bounds import compute_share, step_by_links
from ...parallel_backend.strategy import ParallelStrategy

if TYPE_CHECKING:
    from ..host.calls import RunRecord

NOT_COMPARED = "not compared"
SAME = 0.02  # relative difference up to which two times are equal, since steps of one run differ by more
PLAIN_PERCENT = 1.1  # below this factor a gain is shown in percent: "1.0 ×" would say nothing
# An earlier run's time counts only if the machine is as busy as it was then: the step time of the strategy that runs
# now must equal its earlier one within this fraction.
AS_BUSY = 0.1


def typical(times: Sequence[float]) -> float:
    """Returns the median without the first time, which includes one-time costs."""
    return median(times[1:] or times)


def average(times: Sequence[float]) -> float:
    """Returns the mean without the first time: for runs in which a step cache answers some steps."""
    return mean(times[1:] or times)


def as_shown(seconds: float) -> float:
    """Rounds to the three digits that all panels print, so that two printed times give the printed factor."""
    return float(f"{seconds:.3g}")


def compare_with_one_device(seconds: float, one_device: float | None) -> str:
    """Returns a sentence that compares `seconds` of a step with `one_device` seconds; None or 0: not measured."""
    seconds = as_shown(seconds)
    if not one_device or not seconds:
        return NOT_COMPARED
    factor = as_shown(one_device) / seconds
    if abs(factor - 1) <= SAME:
        return "as fast as one device"
    if factor < 1:
        return f"{100 * (1 - factor):.0f} % slower than one device"
    if factor < PLAIN_PERCENT:
        return f"{100 * (factor - 1):.0f} % faster than one device"
    return f"{factor:.1f} × as fast as one device"


def step_seconds(record: RunRecord) -> float:
    """Returns the seconds of a step, or model call, under the strategy that ran last. The record has at least one run.

    If the run tried several strategies, only the steps under the last one count.
    """
    if record.reused_calls:
        return average(record.step_seconds)
    return tried_seconds(record).get(record.strategy.canonical) or typical(record.step_seconds)


def tried_seconds(record: RunRecord) -> dict[ParallelStrategy, float]:
    """Returns the seconds of a step under each strategy that this run timed: the shortest step of each. The run chose
    the fastest by it (trials.py), so the printed times never contradict the choice."""
    return {trial.strategy.canonical: min(trial.seconds) for trial in record.trials if trial.seconds}


def one_device_seconds(record: RunRecord) -> float | None:
    """Returns the seconds of a step on one device: from this run if it tried one, else from an earlier run if the
    machine was as busy as now (AS_BUSY). None if neither is known."""
    one = ParallelStrategy()
    if (tried := tried_seconds(record).get(one)) is not None:
        return tried
    earlier = {c.strategy: c.step_s for c in record.plan.candidates} if record.plan is not None else {}
    then, now = earlier.get(record.strategy.canonical), step_seconds(record)
    if then is None or abs(now / then - 1) > AS_BUSY:
        return None
    return earlier.get(one)


def compared_by_links(record: RunRecord) -> str:
    """Returns how many times as fast as one device the last strategy is by the speed of the links alone, e.g. `1.7 × by
    the links alone`. If one device was not measured: from which step time on the strategy is faster. "" if it ran on
    one device, or the links were not measured."""
    plan, strategy = record.plan, record.strategy
    if plan is None or plan.link is None or not 1 < strategy.world_size == len(plan.devices):
        return ""
    by_links = partial(step_by_links, plan.job, strategy)
    link = (plan.link.bytes_per_second, plan.link.latency_s)
    if (one := one_device_seconds(record)) is not None:
        return f"{one / by_links(one, *link):.1f} × by the links alone"
    saved = 1 - compute_share(plan.job, strategy)
    if saved <= 0:  # no device computes less than one device alone would
        return ""
    return f"by the links alone faster where one device takes more than {by_links(0.0, *link) / saved:.2g} s per step"


def count_gain(record: RunRecord) -> None:
    """Adds to the gain of the prompt the seconds that all steps of a record saved against one device, if that is
    known. The record has at least one run."""
    one = one_device_seconds(record)
    if one is not None and record.strategy.world_size > 1:
        saved = as_shown(one) - as_shown(step_seconds(record))
        PHASES.add_gain(record.prompt_id, len(record.step_seconds) * saved)


def compare_prompt(prompt_id: str) -> str:
    """Returns how a prompt until now compares with one device; phases that were not timed there count as equally long.
    "" if it only sampled, or the time on one device is not known."""
    seconds, one_device = PHASES.with_and_without_gain(prompt_id)
    return f"whole prompt so far: {compare_with_one_device(seconds, one_device)}" if seconds else ""


def compared(record: RunRecord) -> str:
    """Returns how a record with at least one run compares with one device; "" if it ran on one."""
    if record.strategy.world_size == 1:
        return ""
    return compare_with_one_device(step_seconds(record), one_device_seconds(record))
