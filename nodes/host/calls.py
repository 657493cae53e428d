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
from ...parallel_backend.requests import LoadInfo, PatchInfo, Placement, RunInfo
from ...parallel_backend.sidecar import pool
from ...parallel_backend.sidecar.sidecar import Sidecar
from ...parallel_backend.strategy import ParallelStrategy
from .memory import memory_flag
from .settings import permitted

log = logging.getLogger(__name__)


@dataclass
class RunRecord:
    """The record of a sampling run, collected call by call for the report."""

    decisions: list[Decision] = field(default_factory=list)
    plan: ExecutionPlan | None = None  # the latest, with what was foreseen
    loads: list[LoadInfo] = field(default_factory=list)
    patched: PatchInfo | None = None  # the LoRAs that are in place, and what it took to put them there
    runs: list[RunInfo] = field(default_factory=list)
    devices: tuple[str, ...] = ()
    stepwise_because: str | None = None
    cache_threshold: float | None = None  # None: no step cache was wanted

    def add_run(self, plan: ExecutionPlan, info: RunInfo) -> None:
        """A request of this run has ended well; `info` tells a load before it too."""
        self.plan, self.devices = plan, plan.devices
        if not self.decisions or self.decisions[-1] != plan.decision:
            self.decisions.append(plan.decision)
        self.runs.append(info)
        load = info.load
        if load is None:
            return
        if not load.cached:
            self.loads.append(load)
        if self.patched is None or (load.patched is not None and not load.patched.cached):
            self.patched = load.patched


def plan_job(
    settings: StrategySettings, job: Job, try_out: Callable[[Sidecar, Placement], RunInfo]
) -> ExecutionPlan:
    """The plan for `job`. Where only trying can tell, `try_out` runs a few steps with each strategy first."""
    settings = permitted(settings, job.steps, attention=job.model.compute_options.attention)
    machine = find_machine(settings, memory_flag())

    def on_ranks(strategy: ParallelStrategy, devices: tuple[str, ...]) -> RunInfo:
        decision, options = Decision(strategy, settings.engine, ""), job.model.uncompiled.compute_options
        with ranks_for(decision, devices, options) as (sidecar, placement):
            return try_out(sidecar, placement)

    history = open_history(machine.devices)
    return plan_by_trial_runs(settings, job, machine, history, on_ranks, report_progress)


@contextmanager
def ranks_for(
    decision: Decision, devices: tuple[str, ...], compute_options: ComputeOptions = DEFAULT_COMPUTE
) -> Iterator[tuple[Sidecar, Placement]]:
    """The sidecar of these devices, started or not; inside, the ranks' errors become the ones ComfyUI knows."""
    with errors_as_comfyuis():
        yield pool.get_sidecar(devices), Placement(decision.strategy, decision.engine, compute_options)


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
