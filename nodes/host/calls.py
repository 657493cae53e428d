"""Calls to the ranks as ComfyUI expects them: interrupts, its out-of-memory error, text under the running node."""

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
from ...parallel_backend.planner.workload.checkpoint_model import CheckpointModel
from ...parallel_backend.planner.workload.workload import Job
from ...parallel_backend.requests import LoadInfo, RunInfo
from ...parallel_backend.sidecar import pool
from ...parallel_backend.sidecar.group.lease import PROMPT_ID
from ...parallel_backend.sidecar.sidecar import Sidecar
from ...parallel_backend.strategy import ParallelStrategy
from ...parallel_backend.trials import Trial
from .memory import eviction_notes, memory_flag
from .offload import offload_comfyui_models
from .settings import permitted, setting
from .shown_node import shown_node

log = logging.getLogger(__name__)

_COMPILE_CHOICE = CompileChoice()  # ranks and what they compiled last as long as this process


def running_prompt_id() -> str:
    """ComfyUI's id of the prompt that runs in this thread, "" for none."""
    context = get_executing_context()
    return "" if context is None else str(context.prompt_id)


@dataclass
class RunRecord:
    """The record of a sampling run, collected call by call for the report."""

    plans: list[Plan] = field(default_factory=list)  # that differ in what there is to say of them
    plan: Plan | None = None  # the latest, with what was foreseen
    loads: list[LoadInfo] = field(default_factory=list)
    switches: list[LoadInfo] = field(default_factory=list)  # to a model that was held beside others
    dropped: list[str] = field(default_factory=list)  # the models that gave way, and why
    patched: int = 0  # weights that LoRAs change
    runs: list[RunInfo] = field(default_factory=list)
    trials: tuple[Trial, ...] = ()  # of strategies on the way
    devices: tuple[str, ...] = ()
    cache_threshold: float | None = None  # None: no step cache was wanted
    price_per_hour: float = 0.0  # of a device, in the user's currency; 0: none is set
    notes: list[str] = field(default_factory=list)  # what else there is to say of it, in words
    prompt_id: str = field(default_factory=running_prompt_id)

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """A job that is shipped leaves its record here."""
        return (type(None), ())

    @property
    def strategy(self) -> ParallelStrategy:
        """Of the latest run, of which there is at least one."""
        return self.runs[-1].strategy

    def name_of(self, strategy: ParallelStrategy) -> str:
        """A strategy in words, by what it shares out of this run's model."""
        return strategy.describe() if self.plan is None else self.plan.job.model.shape.describe(strategy)

    def add_run(self, plan: Plan, info: RunInfo) -> None:
        """A request of this run has ended well; `info` tells a load before it too."""
        self.plan, self.devices = plan, plan.devices
        if not self.plans or self.plans[-1].summary != plan.summary:
            self.plans.append(plan)
        self.runs.append(info)
        self.trials = info.trials or self.trials
        load = info.load
        if load is None:
            return
        if not load.cached:
            self.loads.append(load)
        if load.switched:
            self.switches.append(load)
        self.dropped += load.notes


def plan_job(settings: StrategySettings, job: Job) -> Plan:
    """The plan for `job`, with the strategies that it tries on its way."""
    settings = permitted(settings, job.steps, computing=job.model.compute_options)
    machine = _machine_of(settings)
    history, topology = open_history(machine.devices), topology_of(machine.devices, visible_topology())
    job, told = _COMPILE_CHOICE.settle(job, machine.devices, topology, history)
    tries = bool(setting("try_strategies"))
    plan = _of_as_many_ranks(plan_execution(settings, job, machine, history, tries=tries), settings, machine)
    warm = pool.running_within(machine.devices)
    if settings.mode == "auto" and warm is not None and _does_alone(warm, plan):
        plan = replace(plan, devices=warm.devices)
    return plan.note(*([told] if told else ()), *eviction_notes(), *offload_comfyui_models(plan))


def _machine_of(settings: StrategySettings) -> LocalMachine:
    return find_machine(settings.devices, in_order=settings.fixes_order, memory_flag=memory_flag())


def _does_alone(warm: Sidecar, plan: Plan) -> bool:
    """Whether the first of these ranks can run a plan for one device while the others wait: to start another one takes
    longer than most jobs on one device, and the next job may want them all again."""
    model = plan.job.model
    holds = isinstance(model, CheckpointModel) and model.file.path in {spec.path for spec in warm.models}
    return holds and plan.strategy.world_size == 1 and warm.devices[:1] == plan.devices


def plan_by_rule(settings: StrategySettings, job: Job) -> Plan:
    """The plan for `job` without measurements."""
    settings = permitted(settings, job.steps, computing=job.model.compute_options)
    machine = _machine_of(settings)
    return _of_as_many_ranks(plan_execution(settings, job, machine, history=None), settings, machine)


def _of_as_many_ranks(plan: Plan, settings: StrategySettings, machine: LocalMachine) -> Plan:
    """With the ranks that degrees set by hand ask for also where these mean nothing to this call, for want of CFG say:
    the first one computes, and the run's next call may want them all."""
    requested = settings.strategy.world_size
    if settings.mode == "manual" and requested > 1 and plan.strategy == ParallelStrategy():
        return replace(plan, devices=machine.devices[:requested])
    return plan


@contextmanager
def errors_as_comfyuis() -> Iterator[None]:
    """A cancel becomes ComfyUI's interrupt, and memory that ran out on a rank its out-of-memory error. What the ranks
    do inside belongs to the prompt that runs."""
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
    """Shows what the ranks are doing under the node that runs, and in the log."""
    log.info("parallel sampling: %s", text)
    from server import PromptServer  # imports ComfyUI's whole server: not wanted before it runs

    shown = shown_node()
    server = getattr(PromptServer, "instance", None)
    if shown is not None and server is not None:
        server.send_progress_text(text, shown[1])


def refusal(effect: str, remedy: str = "take it out") -> RequestError:
    """The error for one effect; every one names the way that works."""
    return RequestError(
        f"The parallel model cannot honour {effect} yet, and does not ignore it silently; {remedy}, or use stock "
        f"loaders such as UNETLoader and KSampler for this graph."
    )
