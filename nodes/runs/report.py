"""Writes the report of a sampling run in words: what ran, where, why, how long, and how it compares with one device.

All panels, badges, tables and reports give one step time for a run, and one sentence that compares it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from statistics import mean, median
from typing import TYPE_CHECKING

from ...parallel_backend.observability.cost import amount, money
from ...parallel_backend.observability.prompt_phases import PHASES
from ...parallel_backend.observability.timeline import in_words, timeline
from ...parallel_backend.options import APPROXIMATE_KERNELS
from ...parallel_backend.options import SAME as SAME_DTYPE
from ...parallel_backend.planner.step_bounds import compute_share, step_by_links
from ...parallel_backend.strategy import ParallelStrategy
from ...parallel_backend.trials import BUDGET, GAIN

if TYPE_CHECKING:
    from ..host.calls import RunRecord

NOT_COMPARED = "not compared"
SAME = 0.02  # relative difference up to which two times are equal, since steps of one run differ by more
PLAIN_PERCENT = 1.1  # below this factor a gain is shown in percent: "1.0 ×" would say nothing
# An earlier run's time counts only if the machine is as busy as it was then: the step time of the strategy that runs
# now must equal its earlier one within this fraction.
AS_BUSY = 0.1
CLOSE = "close to the picture of one device"


def write_report(record: RunRecord) -> str:
    """Returns the report, one line per fact; times in seconds, sizes in MiB."""
    runs = record.runs
    lines = [f"strategy: {_strategy(record)}"]
    lines.append(_result(record))
    lines += _step_cache(record)
    lines.append(f"engine: {', '.join(dict.fromkeys(run.engine for run in runs)) or 'none'}")
    lines += _computing(record)
    lines.append(f"devices: {', '.join(record.devices) or 'none'}")
    if times := record.step_seconds:
        lines += _foreseen(record)
        lines += _trials(record)
        first = "" if len(times) == 1 else f", first {times[0]:.3g} s, {len(times)} in all"
        middle = "mean" if record.reused_calls else "median"
        lines.append(f"step: {middle} {step_seconds(record):.3g} s{first}")
        lines += in_words(timeline(record.runs[-1]), record.devices)
    cold = [load.seconds for load in record.loads if not load.cached]
    lines.append(f"load: {_seconds(sum(cold))}" if cold else "load: 0 s (weights were warm)")
    lines += [
        f"switched to {load.model} (held, {load.seconds * 1e3:.1f} ms)"
        for load in record.loads
        if load.switched
    ]
    if record.patched:
        lines.append(f"LoRA: {_count(record.patched, 'weight')} changed")
    moved = sum(sum(run.bytes_sent) for run in runs)
    lines.append(f"moved between devices: {moved / 2**20:.2f} MiB")
    lines += phases_in_words(record.prompt_id)
    lines += _cost(record)
    notes = [note for plan in record.plans for note in plan.notes]
    notes += [note for run in runs for note in run.notes]
    notes += [note for load in record.loads for note in load.notes]
    lines += [f"note: {note}" for note in dict.fromkeys([*notes, *record.notes])]
    return "\n".join(lines)


def phases_in_words(prompt_id: str) -> list[str]:
    """Returns lines on how long a prompt has used the devices for each phase; empty if it only sampled."""
    return [*PHASES.in_words(prompt_id), *filter(None, [compare_prompt(prompt_id)])]


def summarise(record: RunRecord) -> str:
    """Returns one short line to show under the node, for a record with at least one run."""
    strategy, seconds = record.name_of(record.strategy), step_seconds(record)
    if reused := record.reused_calls:
        calls = sum(run.model_calls for run in record.runs)
        return f"{strategy}: {seconds:.3g} s per step on average, {reused} of {calls} model calls reused"
    return f"{strategy}: {seconds:.3g} s per step"


def badge(record: RunRecord) -> dict[str, object]:
    """Returns the shortest summary of a record with at least one run, for the page. "seconds": of a step."""
    seconds = as_shown(step_seconds(record))
    return {"strategy": devices_and_split(record), "seconds": seconds, "compared": compared(record)}


def headline(record: RunRecord) -> str:
    """Returns one short line for a record with at least one run, e.g. `2 devices (CFG) · 0.045 s per step ·
    1.8 × as fast as one device · whole prompt so far: 1.4 × as fast as one device · same picture as one device`."""
    split, seconds, speed = devices_and_split(record), as_shown(step_seconds(record)), compared(record)
    prompt = compare_prompt(record.prompt_id)
    picture = CLOSE if not record.exact else "same picture as one device" if speed else ""
    return " · ".join(filter(None, (split, f"{seconds:g} s per step", speed, prompt, picture)))


def devices_and_split(record: RunRecord) -> str:
    """Returns the count of devices and how they share the work, e.g. `2 devices (CFG)` or `4 devices (CFG 2 × Ulysses
    2)`."""
    name, count = record.name_of(record.strategy), record.strategy.world_size
    if count == 1:
        return name
    axis, _, degree = name.rpartition(" ")
    return f"{count} devices ({axis if degree == str(count) else name})"


def _result(record: RunRecord) -> str:
    if record.exact:
        return "result: exact (what one device gives)"
    approximate = [run for run in record.runs if not run.exact]
    if kernels := {run.kernel for run in approximate} & set(APPROXIMATE_KERNELS):
        return f"result: approximate (attention {kernels.pop()} quantises; auto is exact)"
    if any(run.reused_calls for run in approximate):
        return "result: approximate (step cache; a lower cache_threshold comes nearer to the exact result)"
    if approximate[0].strategy.pipefusion_degree > 1:
        return (
            f"result: approximate (PipeFusion: exact for the first "
            f"{_count(approximate[0].strategy.warmup_steps, 'step')}, then "
            f"patches attend to keys and values of the step before; more warmup_steps come nearer to one device's "
            f"result)"
        )
    if record.plan.job.model.compute_options.exchange_dtype != SAME_DTYPE:
        return "result: approximate (exchange_dtype fp8 rounds what devices send each other; same is exact)"
    return "result: approximate (a note says why)"


def _step_cache(record: RunRecord) -> list[str]:
    """Returns a line on how many calls the step cache answered; empty if it was off or counted no calls."""
    if record.cache_threshold is None or not record.runs:
        return []
    if not record.cache_threshold:
        return ["step cache: reuses nothing at threshold 0"]
    calls, reused = sum(run.model_calls for run in record.runs), record.reused_calls
    if not calls:  # a note says why
        return []
    if not reused:
        return [
            f"step cache: each of {calls} model calls changed more than the threshold {record.cache_threshold:g}; "
            f"nothing was reused"
        ]
    return [
        f"step cache: {reused} of {calls} model calls reused the residual of the last computed one (threshold "
        f"{record.cache_threshold:g}): approximate"
    ]


def _computing(record: RunRecord) -> list[str]:
    """Returns how the blocks ran: the attention kernel, and how long compiling took."""
    if not record.runs:
        return []
    lines = [f"attention: {', '.join(dict.fromkeys(run.kernel for run in record.runs))}"]
    compiled = [run.compiled for run in record.runs if run.compiled is not None]
    if graphs := sum(one.graphs for one in compiled):
        seconds = sum(one.seconds for one in compiled)
        lines.append(f"compile: {_count(graphs, 'graph')} in {seconds:.1f} s, kept for the next prompts")
    elif compiled:
        lines.append("compile: blocks (were compiled)")
    return lines


def _cost(record: RunRecord) -> list[str]:
    """Returns the device-seconds that the run took, with start and load, and their cost if a price is set."""
    images = record.plan.job.batch if record.plans else 1
    held = sum(run.held_seconds for run in record.runs) * len(record.devices)

    def per_image(total: str, each: str) -> str:
        return total if images == 1 else f"{total} for {images} images, {each} each"

    spent = per_image(f"{held:.3g} s", f"{held / images:.3g} s")
    lines = [f"GPU time used: {spent} (starting and loading included)"]
    if record.price_per_hour:
        total = money(held, record.price_per_hour)
        spent = per_image(amount(total), amount(total / images))
        lines.append(
            f"cost: {spent}, at {record.price_per_hour:g} per GPU-hour (Settings, Parallel Sampling)"
        )
    return lines


def _seconds(seconds: float) -> str:
    """Formats seconds; short times get three decimals, so that they do not read 0.00."""
    return f"{seconds:.2f} s" if seconds >= 0.1 else f"{seconds:.3f} s"


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _strategy(record: RunRecord) -> str:
    reasons = "; then ".join(dict.fromkeys(plan.reason for plan in record.plans))
    if not any(trial.seconds for trial in record.trials):
        return reasons or "nothing ran"
    return f"{record.name_of(record.strategy)}: the fastest of those tried in this run, which began with {reasons}"


def _trials(record: RunRecord) -> list[str]:
    """Returns lines on the strategies that the run tried, and how much faster the fastest one was."""
    tried = tried_seconds(record)
    if not tried:
        return _left_out(record, 0.0) if not record.trials else []
    first, won = next(iter(tried)), record.strategy.canonical
    images = record.plan.job.batch
    times = ", ".join(f"{record.name_of(strategy)} {seconds:.3g} s" for strategy, seconds in tried.items())
    if won == first:
        result = f"none was faster than {record.name_of(first)}, with which it began"
    else:
        factor = as_shown(tried[first]) / as_shown(tried[won])
        result = (
            f"{_named(record, won)} ran the rest, {factor:.1f} times "
            f"{'as fast as' if images == 1 else 'the images a second of'} {record.name_of(first)}"
        )
    if left := [record.name_of(t.strategy) for t in record.trials if not t.seconds]:
        result += f"; behind, or failed: {', '.join(left)}"
    of = "" if images == 1 else f" of {images} images"
    words = f"tried: a step{of} took {times}; {result}; kept for the next runs"
    return [words, *_left_out(record, tried[won])]


def _left_out(record: RunRecord, best_s: float) -> list[str]:
    """Returns lines on the candidates that were not tried, and why. `best_s`: seconds of a step under the fastest."""
    started = {trial.strategy for trial in record.trials}
    untried = [trial for trial in record.plan.trials.candidates if trial.strategy not in started]
    slower = [trial for trial in untried if 0 < best_s <= trial.at_least_s * GAIN]
    dear = [trial for trial in untried if trial not in slower]
    too_dear = f"finding out might cost more than {BUDGET:.0%} of this job; a longer one, later ones or bench will tell"
    return [
        f"not tried: {', '.join(record.name_of(trial.strategy) for trial in group)} ({why})"
        for group, why in ((slower, "these GPUs' data sheet says it cannot be faster"), (dear, too_dear))
        if group
    ]


def _named(record: RunRecord, strategy: ParallelStrategy) -> str:
    if strategy.world_size == 1:
        return "one device, for which splitting this work costs more than it gains,"
    note = " (whole images on each device)" if strategy.data_degree == strategy.world_size else ""
    return f"{record.name_of(strategy)}{note}"


def _foreseen(record: RunRecord) -> list[str]:
    """Returns the predicted memory and, if they are known, the expected step time and gain next to the real ones."""
    plan = record.plan
    lines = [f"memory, predicted for the fullest device: {plan.memory.describe()}"]
    if record.reused_calls:  # the expected step computes all blocks
        return lines
    seen = next((c.step_s for c in plan.candidates if c.strategy == record.strategy.canonical), None)
    if seen is not None:
        off = round(step_seconds(record) / seen - 1, 2)
        found = f"{abs(off):.0%} {'more' if off > 0 else 'less'}" if off else "the same"
        lines.append(f"expected: {seen:.3g} s per step (measured earlier); this run took {found}")
    if by_links := compared_by_links(record):
        measured = compared(record)
        lines.append(f"foreseen: {by_links}" + f", measured: {measured}" * (measured != NOT_COMPARED))
    return lines


def usual(times: Sequence[float], reused_calls: int) -> float:
    """Returns the median, or the mean if a step cache answered some steps. Leaves out the first time if there are
    others: it includes one-time costs."""
    warm = times[1:] or times
    return mean(warm) if reused_calls else median(warm)


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
    tried = tried_seconds(record).get(record.strategy.canonical)
    return tried or usual(record.step_seconds, record.reused_calls)


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
    earlier = {c.strategy: c.step_s for c in record.plan.candidates}
    then, now = earlier.get(record.strategy.canonical), step_seconds(record)
    if then is None or abs(now / then - 1) > AS_BUSY:
        return None
    return earlier.get(one)


def compared_by_links(record: RunRecord) -> str:
    """Returns how many times as fast as one device the last strategy is by the speed of the links alone, e.g. `1.7 × by
    the links alone`. If one device was not measured: from which step time on the strategy is faster. "" if it ran on
    one device, or the links were not measured."""
    plan, strategy = record.plan, record.strategy
    if plan.link is None or not 1 < strategy.world_size == len(plan.devices):
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
