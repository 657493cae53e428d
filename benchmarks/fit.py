"""Fits the cost model's constants to measurements, held near physically sensible priors; the same for all hardware."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import replace
from statistics import mean, median

from published import Row, find_one_gpu

from parallel_backend.planner.cost import model as cost_model
from parallel_backend.planner.cost.model import Constants, fixed_seconds, predict

FITTED = (
    "call_s",
    "hop_s",
    "host_block_s",
    "host_call_s",
    "reached_nvlink",
    "reached_pcie",
    "reached_host",
    "reached_outside",
    "ring_overlap",
    "pipeline",
    "decoder",
)
PRIOR = Constants()
# A prior's width, in natural logarithm: a factor of 1.6 either way is unsurprising.
WIDTH = 0.5
# How much one standard deviation from every prior weighs against the mean error of the data.
PRIOR_WEIGHT = 0.01
# Shares cannot exceed one.
LIMITS = {name: 1.0 for name in FITTED if not name.endswith("_s")}


def one_gpu_step(row: Row, seconds: float, constants: Constants) -> float:
    """Seconds of one denoising step inside a published one-device time, its fixed part taken off."""
    if row.per_step:
        return seconds
    fixed = fixed_seconds(row.work, row.machine.card, constants) if row.with_fixed else 0.0
    return (seconds - min(fixed, 0.3 * seconds)) / row.work.steps


def predict_seconds(row: Row, constants: Constants, one_gpu: float | None) -> float:
    """What the model says the row's number is; `one_gpu`: that number on one device, if it is known."""
    step, work = None, row.work
    if one_gpu and not row.stated:
        # The size or the steps are unknown: as many steps of the usual size as a card of this rate can have done.
        usual = cost_model.one_gpu_step(work, row.machine.card, constants, row.mode)
        fixed = fixed_seconds(work, row.machine.card, constants) if row.with_fixed else 0.0
        work = replace(work, steps=max(1, round((one_gpu - min(fixed, 0.3 * one_gpu)) / usual)))
        row = replace(row, work=work)
    if one_gpu:
        step = one_gpu_step(row, one_gpu, constants)
    p = predict(
        work,
        row.candidate,
        row.machine,
        constants,
        mode=row.mode,
        one_gpu_s=step,
    )
    if row.per_step:
        return p.step_s
    fixed = p.fixed_s if row.with_fixed else 0.0
    if one_gpu and row.with_fixed:
        fixed = min(fixed, 0.3 * one_gpu)
    return p.step_s * work.steps + fixed


def fit(rows: list[Row]) -> Constants:
    """Constants that explain speed-ups (and ratios between strategies where one device's time is unknown)."""
    alone = find_one_gpu(rows)
    known = [row for row in rows if row.gpus > 1 and row.seconds and row.key in alone]
    others = defaultdict(list)
    for row in rows:
        if row.gpus > 1 and row.seconds and row.key not in alone:
            others[row.key].append(row)
    relative = [group for group in others.values() if len(group) > 1]
    start = PRIOR.replace(**_rates(rows))

    def loss(constants: Constants) -> float:
        errors = [math.log(predict_seconds(r, constants, alone[r.key]) / r.seconds) for r in known]
        for group in relative:
            logs = [math.log(predict_seconds(r, constants, None) / r.seconds) for r in group]
            errors += [error - mean(logs) for error in logs]
        distance = [math.log(getattr(constants, n) / getattr(PRIOR, n)) / WIDTH for n in FITTED]
        # Absolute errors, so that one odd measurement does not bend all others.
        return mean(abs(e) for e in errors or [0.0]) + PRIOR_WEIGHT * sum(d * d for d in distance)

    best, lowest = start, loss(start)
    for step in (0.4, 0.2, 0.1):
        improved = True
        while improved:
            improved = False
            for name in FITTED:
                for factor in (math.exp(step), math.exp(-step)):
                    value = min(getattr(best, name) * factor, LIMITS.get(name, math.inf))
                    trial = best.replace(**{name: value})
                    if (found := loss(trial)) < lowest - 1e-6:
                        best, lowest, improved = trial, found, True
    return best


def _rates(rows: list[Row]) -> dict[str, float]:
    """Median share of the peak rate that published one-device runs reach, per mode."""
    reached = defaultdict(list)
    for row in rows:
        known = row.stated and row.machine.card.known and row.work.family.known
        if row.gpus == 1 and row.seconds and known:
            step = one_gpu_step(row, row.seconds, PRIOR)
            reached[row.mode].append(row.work.flop / step / (row.machine.card.tflops * 1e12))
    return {mode: min(1.0, median(values)) for mode, values in reached.items() if len(values) > 2}
