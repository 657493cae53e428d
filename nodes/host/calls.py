"""Calls to the ranks that look like ComfyUI's own work: interrupts, out-of-memory errors, text under the node."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import comfy.model_management
from comfy_execution.utils import get_executing_context

from ...parallel_backend.errors import Cancelled, OutOfMemory, RequestError
from ...parallel_backend.machine.local import LocalMachine, topology_of
from ...parallel_backend.machine.probe import visible_topology
from ...parallel_backend.planner.compile_choice import CompileChoice
from ...parallel_backend.planner.history import open_history
from ...parallel_backend.planner.plan import find_machine, plan_execution
from ...parallel_backend.planner.rules import Plan, StrategySettings
from ...parallel_backend.planner.workload.workload import Job
from ...parallel_backend.requests import LoadInfo, RunInfo
from ...parallel_backend.sidecar import pool
from ...parallel_backend.sidecar.group.lease import PROMPT_ID
from ...parallel_backend.sidecar.sidecar import Sidecar
from ...parallel_backend.strategy import ParallelStrategy
from ...parallel_backend.trials import Trial
from .memory import eviction_notes, memory_flag
from .offload import offload_comfyui_models
from .page import comfyui_server, shown_node
from .settings import permitted, setting

log = logging.getLogger(__name__)

# The keys under which a MODEL's transformer_options carry what belongs to this pack.
SETTINGS, RECORD = "parallel_strategy", "parallel_record"  # of StrategySettings and RunRecord
COMPUTE_OPTIONS, STEP_CACHE = "parallel_computing", "parallel_step_cache"  # of ComputeOptions and a threshold

_COMPILE_CHOICE = CompileChoice()  # one per process: ranks and what they compiled live no longer


def running_prompt_id() -> str:
    """Returns ComfyUI's id of the prompt that runs in this thread, or "" if none does."""
    context = get_executing_context()
    return "" if context is None else str(context.prompt_id)


@dataclass
class RunRecord:
    """The record of a sampling run, collected call by call for the report."""

    plans: list[Plan] = field(default_factory=list)  # one for each run
    runs: list[RunInfo] = field(default_factory=list)
    patched: int = 0  # weights that LoRAs change
    cache_threshold: float | None = None  # None: no step cache was requested
    price_per_hour: float = 0.0  # per device, in the user's currency; 0 if none is set
    notes: list[str] = field(default_factory=list)  # further lines of the report
    prompt_id: str = field(default_factory=running_prompt_id)

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """Pickles the record as None: it stays in this process when its job is shipped."""
        return (type(None), ())

    @property
    def plan(self) -> Plan:
        """The plan of the latest run, with its predictions. There must be at least one run."""
        return self.plans[-1]

    @property
    def devices(self) -> tuple[str, ...]:
        return self.plan.devices if self.plans else ()

    @property
    def loads(self) -> list[LoadInfo]:
        """The model loads before runs, in order."""
        return [run.load for run in self.runs if run.load is not None]

    @property
    def trials(self) -> tuple[Trial, ...]:
        """The strategies compared during the latest run that compared any."""
        return next((run.trials for run in reversed(self.runs) if run.trials), ())

    @property
    def strategy(self) -> ParallelStrategy:
        """The strategy of the latest run. There must be at least one run."""
        return self.runs[-1].strategy

    @property
    def step_seconds(self) -> tuple[float, ...]:
        """The seconds of each step, or model call, of all runs."""
        return tuple(seconds for run in self.runs for seconds in run.step_seconds)

    @property
    def reused_calls(self) -> int:
        """How many model calls a step cache answered."""
        return sum(run.reused_calls for run in self.runs)

    @property
    def exact(self) -> bool:
        """True if each run gave what one device gives."""
        return all(run.exact for run in self.runs)

    def name_of(self, strategy: ParallelStrategy) -> str:
        """Returns a strategy in words that say what it splits in this run's model."""
        return self.plan.job.model.shape.describe(strategy)

    def add_run(self, plan: Plan, info: RunInfo) -> None:
        """Adds a request that succeeded."""
        self.plans.append(plan)
        self.runs.append(info)


def plan_job(settings: StrategySettings, job: Job) -> Plan:
    """Plans `job`, with the strategies to try while it runs, and makes room for it on its devices."""
    settings = permitted(settings, job.steps, computing=job.model.compute_options)
    machine = _machine_of(settings)
    history, topology = open_history(machine.devices), topology_of(machine.devices, visible_topology())
    job, compile_note = _COMPILE_CHOICE.settle(job, machine.devices, topology, history)
    tries = bool(setting("try_strategies"))
    plan = _of_as_many_ranks(plan_execution(settings, job, machine, history, tries=tries), settings, machine)
    warm = pool.running_within(machine.devices)
    if settings.mode == "auto" and warm is not None and _does_alone(warm, plan):
        plan = replace(plan, devices=warm.devices)
    return plan.note(*filter(None, [compile_note]), *eviction_notes(), *offload_comfyui_models(plan))


def _machine_of(settings: StrategySettings) -> LocalMachine:
    return find_machine(settings.devices, in_order=settings.fixes_order, memory_flag=memory_flag())


def _does_alone(warm: Sidecar, plan: Plan) -> bool:
    """Returns True if the first rank of `warm` can run this one-device plan while the others wait. Starting another
    process takes longer than most one-device jobs, and the next job may use all ranks again."""
    holds = plan.job.model.file.path in {spec.path for spec in warm.models}
    return holds and plan.strategy.world_size == 1 and warm.devices[:1] == plan.devices


def plan_by_rule(settings: StrategySettings, job: Job) -> Plan:
    """Returns the plan for `job` that follows from the rule, without measurements."""
    settings = permitted(settings, job.steps, computing=job.model.compute_options)
    machine = _machine_of(settings)
    return _of_as_many_ranks(plan_execution(settings, job, machine, history=None), settings, machine)


def _of_as_many_ranks(plan: Plan, settings: StrategySettings, machine: LocalMachine) -> Plan:
    """Keeps all ranks of degrees set by hand if this call can use only one (a CFG degree without CFG, for example): the
    first rank computes, and the run's next call may use them all."""
    requested = settings.strategy.world_size
    if settings.mode == "manual" and requested > 1 and plan.strategy == ParallelStrategy():
        return replace(plan, devices=machine.devices[:requested])
    return plan


@contextmanager
def errors_as_comfyuis() -> Iterator[None]:
    """Turns a cancel into ComfyUI's interrupt, and a rank's out-of-memory error into ComfyUI's own. Counts the ranks'
    work inside for the running prompt."""
    token = PROMPT_ID.set(running_prompt_id())
    try:
        yield
    except Cancelled:
        comfy.model_management.throw_exception_if_processing_interrupted()
        raise
    except OutOfMemory as error:
        raise comfy.model_management.OOM_EXCEPTION(str(error)) from error
    finally:
        PROMPT_ID.reset(token)


def interrupted() -> bool:
    return comfy.model_management.processing_interrupted()


def report_progress(text: str) -> None:
    """Shows `text`, on what the ranks are doing, under the running node and in the log."""
    log.info("parallel sampling: %s", text)
    shown, server = shown_node(), comfyui_server()
    if shown is not None and server is not None:
        server.send_progress_text(text, shown[1])


def refusal(effect: str, remedy: str = "take it out") -> RequestError:
    """Returns the error for an effect that the ranks cannot honour. `remedy`: what the user can do instead."""
    return RequestError(
        f"The parallel model cannot honour {effect} yet, and does not ignore it silently; {remedy}, or use stock "
        f"loaders such as UNETLoader and KSampler for this graph."
    )
