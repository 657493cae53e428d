"""What runs for a request: the person's choice, what this machine has measured, and whether it fits, in one place."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

from ..devices import is_cpu, resolve_devices
from ..models.flux.checkpoint import FluxFile
from ..options import DEFAULT_COMPUTE, ComputeOptions
from ..requests import ModelSpec
from ..sidecar.device_health import FAILING, left_out
from ..strategy import ModelShape, ParallelStrategy, RequestShape
from .auto import PIXELS_PER_LATENT, MeasurementHistory, in_good_order
from .candidate_table import CandidateEstimate
from .cost.communication import Candidate, Work
from .cost.machine import AutoAdvice
from .history.records import strategy_of
from .memory.fit import MemoryCheck, check_capacity, fits
from .memory.model import Job, RankMemory, fullest_rank
from .ranking import enumerate_candidates, rule_key
from .rules import Decision, StrategySettings, resolve

# ComfyUI's flags for little memory, and what `auto` makes of them: weights shared out over the devices, or in the
# computer's memory as well.
LOWVRAM, NOVRAM = "--lowvram", "--novram"
ECONOMIES = ("", LOWVRAM, NOVRAM)

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ExecutionPlan:
    """`devices`: one per rank, in rank order; `memory`: predicted, of the fullest rank; `outlooks`: all candidates.

    `trials`: strategies to try for a step or two before deciding again, because only that can tell (on the CPU); the
    first and the last one tell most.
    """

    decision: Decision
    devices: tuple[str, ...]
    memory: RankMemory
    outlooks: tuple[CandidateEstimate, ...] = ()
    trials: tuple[ParallelStrategy, ...] = ()


def decide(
    choice: StrategySettings,
    spec: ModelSpec,
    file: FluxFile,
    work: Work,
    *,
    sampler: str = "euler",
    economy: str = "",
    compute_options: ComputeOptions = DEFAULT_COMPUTE,
) -> ExecutionPlan:
    """The strategy for `work` with this model. Raises StrategyError or DeviceError before anything is started.

    `economy`: a flag of ComfyUI's, one of ECONOMIES, that asks `auto` to save devices' memory before time.
    """
    devices, failing = devices_in_use(choice)
    job = job_of(work)
    advice, trials = _advice(choice, spec, file, work, devices, sampler, compute_options)
    shape = RequestShape(batch=work.batch, has_cfg=work.rows == 2)
    decision = resolve(choice, file.shape, shape, devices, advice)
    if failing:
        decision = replace(decision, notes=(left_out(failing), *decision.notes))
    used = devices[: decision.strategy.world_size]
    plan = MemoryCheck(file, spec.weight_dtype, decision.strategy, job, used)
    if choice.mode == "auto":
        decision, plan = _economical(decision, plan, economy)
        if not fits(plan):
            decision, plan = _offloaded(decision, plan, "nothing faster fits in the memory of these devices")
    return ExecutionPlan(decision, used, check_capacity(plan), advice.outlooks, trials)


def devices_in_use(choice: StrategySettings) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The devices of `choice` in rank order, and those left out because ranks failed there. Raises DeviceError."""
    devices = resolve_devices(choice.devices)
    if choice.mode == "manual" or choice.device_shares:  # each place in a list means a device
        return devices, ()
    failing = FAILING.among(devices)
    return in_good_order([device for device in devices if device not in failing]), failing


def job_of(work: Work) -> Job:
    """The same work for the memory model, which counts latent pixels."""
    return Job(
        height=-(-work.height // PIXELS_PER_LATENT),
        width=-(-work.width // PIXELS_PER_LATENT),
        text_tokens=work.text_tokens,
        images=work.batch,
        prompts=work.rows,
        steps=work.steps,
        step_cache=work.step_cache,
    )


def _advice(
    choice: StrategySettings,
    spec: ModelSpec,
    file: FluxFile,
    work: Work,
    devices: tuple[str, ...],
    sampler: str,
    compute_options: ComputeOptions,
) -> tuple[AutoAdvice, tuple[ParallelStrategy, ...]]:
    """What was measured and predicted, and what should be tried. Never the reason why a picture is not made."""

    def memory_of(candidate: Candidate) -> float:
        plan = MemoryCheck(file, spec.weight_dtype, strategy_of(candidate), job_of(work), devices)
        return fullest_rank(plan.memories).private_bytes

    try:
        experience = MeasurementHistory(devices)
        advice = experience.choose(
            spec,
            file,
            work,
            sampler=sampler,
            engine=choice.engine,
            approximation=choice.approximation,
            memory_of=memory_of,
            compute_options=compute_options,
        )
    except Exception:
        log.warning("parallel sampling: what was measured before does not count", exc_info=True)
        return AutoAdvice(None), ()
    if not is_cpu(devices) or advice.choice is not None:
        return advice, ()
    advice = replace(advice, notes=())  # that it takes a trial
    if choice.mode == "manual" or len(devices) == 1 or experience.store.path is None:
        return advice, ()
    return advice, _trials(work, file.shape, len(devices), choice.engine)


def _trials(work: Work, model: ModelShape, count: int, engine: str) -> tuple[ParallelStrategy, ...]:
    """Exact strategies as they are worth a try: all devices by the rule first, one device last.

    Those with as many ranks follow each other, since ranks start anew when their number changes.
    """
    candidates = [
        candidate
        for candidate in enumerate_candidates(work, count, sharded=False)
        if candidate.exact
        and candidate.strategy.tensor_degree == 1
        and not candidate.strategy.violations(model, count, engine)
    ]
    return tuple(c.strategy for c in sorted(candidates, key=rule_key, reverse=True))


def _economical(decision: Decision, plan: MemoryCheck, economy: str) -> tuple[Decision, MemoryCheck]:
    """With weights shared out, or in host memory as well, where ComfyUI was started to save memory."""
    if economy == NOVRAM:
        return _offloaded(decision, plan, f"ComfyUI runs with {economy}")
    if economy != LOWVRAM or not _copies(plan.strategy) or is_cpu(plan.devices):
        return decision, plan
    return _kept(decision, plan, f"shard_weights is on: ComfyUI runs with {economy}", shard_weights=True)


def _offloaded(decision: Decision, plan: MemoryCheck, because: str) -> tuple[Decision, MemoryCheck]:
    """With the weights in host memory, where it fits so."""
    strategy = plan.strategy
    if strategy.pipefusion_degree > 1 or is_cpu(plan.devices):
        return decision, plan
    note = f"offload_weights is on: {because}"
    offloaded = _kept(decision, plan, note, shard_weights=_copies(strategy) > 0, offload_weights=True)
    return offloaded if fits(offloaded[1]) else (decision, plan)


def _kept(decision: Decision, plan: MemoryCheck, note: str, **changes: bool) -> tuple[Decision, MemoryCheck]:
    strategy = plan.strategy.replace(**changes)
    notes = (*decision.notes, note)
    return replace(decision, strategy=strategy, notes=notes), replace(plan, strategy=strategy)


def _copies(strategy: ParallelStrategy) -> int:
    """How many devices hold what another one holds too, and could share it out; a stage of a pipeline is whole."""
    return 0 if strategy.pipefusion_degree > 1 else strategy.row_degree * strategy.sequence_degree - 1
