"""The execution plan of a job: the person's settings, what this machine has measured, and whether it fits."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ..devices import is_cpu, resolve_devices
from ..requests import RESIDENT_SAMPLERS, RunInfo, SampleRequest
from ..sidecar.device_health import FAILING, left_out
from ..strategy import ParallelStrategy
from .auto import rank_strategies
from .history.measurement_history import MeasurementHistory, record_run
from .job import PIXELS_PER_LATENT, Job, JobModel
from .machine.local import LOWVRAM, NOVRAM, LocalMachine, order_devices
from .memory.fit import MemoryCheck, check_capacity, fits
from .memory.rank_memory import RankMemory
from .ranking import RankedCandidate, Ranking, enumerate_candidates, rule_key
from .rules import Decision, StrategySettings, resolve_strategy

# Seconds that trying strategies may take: a person waits for it.
TRIAL_SECONDS = 20.0

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ExecutionPlan:
    """`devices`: one per rank, in rank order; `memory`: predicted, of the fullest rank; `candidates`: all that were
    ranked.

    `trials`: strategies to try for a step or two before deciding again, because only that can tell (on the CPU); the
    first and the last one tell most.
    """

    decision: Decision
    devices: tuple[str, ...]
    memory: RankMemory
    candidates: tuple[RankedCandidate, ...] = ()
    trials: tuple[ParallelStrategy, ...] = ()


def job_from_request(model: JobModel, request: SampleRequest) -> Job:
    """The job of a whole request for the resident loop."""
    job = job_from_latent(
        model,
        request.noise.shape,
        text=request.positive.context.shape[1],
        has_cfg=len(request.prompts) == 2,
        steps=len(request.sigmas) - 1,
    )
    calls = RESIDENT_SAMPLERS.get(request.sampler, 1)
    return replace(job, model_calls=calls, step_cache=request.cache_threshold > 0)


def job_from_latent(
    model: JobModel, latent_shape: Sequence[int], *, text: int, has_cfg: bool, steps: int
) -> Job:
    """The job of denoising latents [B, C, H/8, W/8]. `text`: tokens of the prompt."""
    batch, _, height, width = latent_shape
    return Job(
        model,
        width=width * PIXELS_PER_LATENT,
        height=height * PIXELS_PER_LATENT,
        batch=batch,
        prompts=2 if has_cfg else 1,
        steps=max(1, steps),
        text=text,
    )


def find_machine(settings: StrategySettings, memory_flag: str = "") -> LocalMachine:
    """The devices of `settings` in rank order. Raises DeviceError. `memory_flag`: as in LocalMachine."""
    devices = resolve_devices(settings.devices)
    if settings.mode == "manual" or settings.device_shares:  # each place in a list means a device
        return LocalMachine(devices, memory_flag=memory_flag)
    failing = FAILING.among(devices)
    sound = tuple(device for device in devices if device not in failing)
    return LocalMachine(order_devices(sound), failing, memory_flag)


def plan_execution(
    settings: StrategySettings, job: Job, machine: LocalMachine, history: MeasurementHistory | None
) -> ExecutionPlan:
    """The plan for `job`. Raises StrategyError before anything is started.

    `history`: of the machine's devices; without one the rule decides.
    """
    ranking = _ranking(settings, job, history)
    decision = resolve_strategy(settings, job, machine.devices, ranking)
    if machine.failing:
        decision = replace(decision, notes=(left_out(machine.failing), *decision.notes))
    used = machine.devices[: decision.strategy.world_size]
    check = MemoryCheck(job, decision.strategy, used)
    if settings.mode == "auto":
        decision, check = _economical(decision, check, machine.memory_flag)
        if not fits(check):
            decision, check = _offloaded(
                decision, check, "nothing faster fits in the memory of these devices"
            )
    memory = check_capacity(check)
    if ranking is None or history is None:
        return ExecutionPlan(decision, used, memory)
    tries = not ranking.ranked and machine.on_cpu and history.store.path is not None
    trials = _trials(settings, job, len(machine.devices)) if tries else ()
    return ExecutionPlan(decision, used, memory, ranking.ranked, trials)


def plan_by_trial_runs(
    settings: StrategySettings,
    job: Job,
    machine: LocalMachine,
    history: MeasurementHistory | None,
    try_out: Callable[[ParallelStrategy, tuple[str, ...]], RunInfo],
    report_progress: Callable[[str], None] = lambda text: None,
) -> ExecutionPlan:
    """plan_execution with the help of a few real steps where only they can tell: on a CPU, once for each model and
    size. `try_out` runs at least two steps of `job` with a strategy on devices, one per rank.

    It must leave blocks uncompiled: compiling for each strategy takes longer than the trial, and changes the times of
    all of them alike.
    """
    plan = plan_execution(settings, job, machine, history)
    if not plan.trials:
        return plan
    began = time.perf_counter()
    tried, last = 0, len(plan.trials) - 1
    for number, strategy in enumerate(plan.trials):
        if 0 < number < last and time.perf_counter() - began > TRIAL_SECONDS:
            continue  # one device, the last, is tried in any case
        report_progress(f"trying {strategy.describe()} ({number + 1} of {last + 1})")
        devices = machine.devices[: strategy.world_size]
        record_run(devices, job, try_out(strategy, devices))
        tried += 1
    plan = plan_execution(settings, job, machine, history)
    note = (
        f"{tried} strategies were tried for a few steps each, {time.perf_counter() - began:.1f} s in all, once for "
        f"this model and size"
    )
    decision = replace(plan.decision, notes=(*plan.decision.notes, note))
    return replace(plan, decision=decision, trials=())


def _ranking(settings: StrategySettings, job: Job, history: MeasurementHistory | None) -> Ranking | None:
    """Measurements and predictions, which are never the reason why a picture is not made."""
    if history is None:
        return None
    try:
        return rank_strategies(settings, job, history)
    except Exception:
        log.warning("parallel sampling: what was measured before does not count", exc_info=True)
        return None


def _trials(settings: StrategySettings, job: Job, count: int) -> tuple[ParallelStrategy, ...]:
    """Exact strategies as they are worth a try: all devices by the rule first, one device last.

    None where nothing is to be chosen. Those with as many ranks follow each other, since ranks start anew when their
    number changes.
    """
    if settings.mode == "manual" or count == 1:
        return ()
    candidates = [
        strategy
        for strategy in enumerate_candidates(job, count, sharded=False)
        if strategy.exact
        and strategy.tensor_degree == 1
        and not strategy.violations(job.model.shape, count, settings.engine)
    ]
    return tuple(sorted(candidates, key=rule_key, reverse=True))


def _economical(decision: Decision, check: MemoryCheck, flag: str) -> tuple[Decision, MemoryCheck]:
    """With weights shared out, or in host memory as well, where ComfyUI was started to save memory."""
    if flag == NOVRAM:
        return _offloaded(decision, check, f"ComfyUI runs with {flag}")
    if flag != LOWVRAM or not _copies(check.strategy) or is_cpu(check.devices):
        return decision, check
    return _kept(decision, check, f"shard_weights is on: ComfyUI runs with {flag}", shard_weights=True)


def _offloaded(decision: Decision, check: MemoryCheck, because: str) -> tuple[Decision, MemoryCheck]:
    """With the weights in host memory, where it fits so."""
    strategy = check.strategy
    if strategy.pipefusion_degree > 1 or is_cpu(check.devices):
        return decision, check
    note = f"offload_weights is on: {because}"
    offloaded = _kept(decision, check, note, shard_weights=_copies(strategy) > 0, offload_weights=True)
    return offloaded if fits(offloaded[1]) else (decision, check)


def _kept(decision: Decision, check: MemoryCheck, note: str, **changes: bool) -> tuple[Decision, MemoryCheck]:
    strategy = check.strategy.replace(**changes)
    notes = (*decision.notes, note)
    return replace(decision, strategy=strategy, notes=notes), replace(check, strategy=strategy)


def _copies(strategy: ParallelStrategy) -> int:
    """The number of devices that hold what another one holds too, and could share out; a pipeline's stage is whole."""
    return 0 if strategy.pipefusion_degree > 1 else strategy.row_degree * strategy.sequence_degree - 1
