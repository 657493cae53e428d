"""Decides with the help of a few real steps where only they can tell: on a CPU, once for each model and size."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from ..devices import resolve_devices
from ..models.flux.checkpoint import FluxFile
from ..options import DEFAULT_COMPUTE, ComputeOptions
from ..requests import ModelSpec, RunInfo
from ..strategy import ParallelStrategy
from .auto import remember
from .cost.communication import Work
from .decide import ExecutionPlan, decide
from .rules import StrategySettings

# Seconds that trying strategies may take: a person waits for it.
TRIAL_SECONDS = 20.0
TryOut = Callable[[ParallelStrategy, tuple[str, ...]], RunInfo]


def decide_by_trial_runs(
    choice: StrategySettings,
    spec: ModelSpec,
    file: FluxFile,
    work: Work,
    try_out: TryOut,
    *,
    sampler: str = "euler",
    economy: str = "",
    compute_options: ComputeOptions = DEFAULT_COMPUTE,
    say: Callable[[str], None] = lambda text: None,
) -> ExecutionPlan:
    """As decide.decide. `try_out` runs at least two steps of `work` with a strategy on devices, one per rank.

    It must leave blocks uncompiled, as `uncompiled(computing)` has it: compiling for each strategy takes longer than
    the trial, and changes the times of all of them alike.
    """
    about = {"sampler": sampler, "economy": economy, "compute_options": compute_options}
    decided = decide(choice, spec, file, work, **about)
    if not decided.trials:
        return decided
    began = time.perf_counter()
    tried, last = 0, len(decided.trials) - 1
    for number, strategy in enumerate(decided.trials):
        if 0 < number < last and time.perf_counter() - began > TRIAL_SECONDS:
            continue  # one device, the last, is tried in any case
        say(f"trying {strategy.describe()} ({number + 1} of {last + 1})")
        devices = resolve_devices(choice.devices)[: strategy.world_size]
        info = try_out(strategy, devices)
        remember(devices, spec, file, work, info, sampler, uncompiled(compute_options))
        tried += 1
    decided = decide(choice, spec, file, work, **about)
    note = (
        f"{tried} strategies were tried for a few steps each, {time.perf_counter() - began:.1f} s in all, once for "
        f"this model and size"
    )
    decision = replace(decided.decision, notes=(*decided.decision.notes, note))
    return replace(decided, decision=decision, trials=())


def uncompiled(compute_options: ComputeOptions) -> ComputeOptions:
    """How trials compute what `computing` asks for."""
    return replace(compute_options, compile="off")
