"""Calls to the ranks as ComfyUI expects them: interrupts, its out-of-memory error, text under the running node."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import comfy.model_management
from comfy_execution.utils import get_executing_context

from ...parallel_backend.errors import Cancelled, OutOfMemory
from ...parallel_backend.options import DEFAULT_COMPUTE, ComputeOptions
from ...parallel_backend.planner.decide import ExecutionPlan, find_machine, plan_by_trial_runs
from ...parallel_backend.planner.history.measurement_history import open_history
from ...parallel_backend.planner.job import Job
from ...parallel_backend.planner.rules import Decision, StrategySettings
from ...parallel_backend.requests import LoadInfo, ModelSpec, PatchInfo, Placement, RunInfo
from ...parallel_backend.sidecar import pool
from ...parallel_backend.sidecar.sidecar import Sidecar
from ...parallel_backend.strategy import ParallelStrategy
from ...parallel_backend.wire.weight_patches import NO_PATCHES, WeightPatches
from .memory import memory_flag
from .settings import permitted

log = logging.getLogger(__name__)


@dataclass
class RunRecord:
    """A sampling run, collected call by call for the report."""

    decisions: list[Decision] = field(default_factory=list)
    plan: ExecutionPlan | None = None  # the latest, with what was foreseen
    loads: list[LoadInfo] = field(default_factory=list)
    patched: PatchInfo | None = None  # the LoRAs that are in place, and what it took to put them there
    runs: list[RunInfo] = field(default_factory=list)
    devices: tuple[str, ...] = ()
    stepwise_because: str | None = None
    cache_threshold: float | None = None  # None: no step cache was wanted


def plan_job(
    settings: StrategySettings, job: Job, spec: ModelSpec, try_out: Callable[[Sidecar, Placement], RunInfo]
) -> ExecutionPlan:
    """The plan for `job` with the model of `spec`. Where only trying can tell, `try_out` runs a few steps with each
    strategy first."""
    settings = permitted(settings, job.steps, attention=job.model.compute_options.attention)
    machine = find_machine(settings, memory_flag())

    def on_ranks(strategy: ParallelStrategy, devices: tuple[str, ...]) -> RunInfo:
        decision, options = Decision(strategy, settings.engine, ""), job.model.uncompiled.compute_options
        with ready_sidecar(spec, decision, devices, None, compute_options=options) as (sidecar, placement):
            return try_out(sidecar, placement)

    history = open_history(machine.devices)
    return plan_by_trial_runs(settings, job, machine, history, on_ranks, report_progress)


@contextmanager
def ready_sidecar(
    spec: ModelSpec,
    decision: Decision,
    devices: tuple[str, ...],
    record: RunRecord | None,
    patches: WeightPatches = NO_PATCHES,
    compute_options: ComputeOptions = DEFAULT_COMPUTE,
) -> Iterator[tuple[Sidecar, Placement]]:
    """A started sidecar that holds `spec` with its LoRAs; inside, the ranks' errors become the ones ComfyUI knows."""
    with errors_as_comfyuis():
        sidecar = pool.get_sidecar(devices)
        load = sidecar.load(
            spec, decision.strategy, on_phase=report_progress, should_cancel=interrupted, patches=patches
        )
        if not load.cached:
            report_progress(f"loaded in {load.seconds:.1f} s")
        if record is not None:
            record.devices = devices
            if not record.decisions or record.decisions[-1] != decision:
                record.decisions.append(decision)
            if not load.cached:
                record.loads.append(load)
            if record.patched is None or not load.patched.cached:
                record.patched = load.patched
        yield sidecar, Placement(decision.strategy, decision.engine, compute_options)


@contextmanager
def errors_as_comfyuis() -> Iterator[None]:
    """A cancel becomes ComfyUI's interrupt, and memory that ran out on a rank its out-of-memory error."""
    try:
        yield
    except Cancelled:
        comfy.model_management.throw_exception_if_processing_interrupted()
        raise
    except OutOfMemory as error:
        raise comfy.model_management.OOM_EXCEPTION(str(error)) from error


def interrupted() -> bool:
    return comfy.model_management.processing_interrupted()


def report_progress(text: str) -> None:
    """Shows what the ranks are doing under the node that runs, and in the log."""
    log.info("parallel sampling: %s", text)
    from server import PromptServer  # imports ComfyUI's whole server: not wanted before it runs

    context = get_executing_context()
    server = getattr(PromptServer, "instance", None)
    if context is not None and server is not None:
        server.send_progress_text(text, context.node_id)
