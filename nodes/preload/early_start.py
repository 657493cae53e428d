"""Starts the processes of a prompt when its model is named: they import torch and ComfyUI, some ten seconds, while
ComfyUI loads and runs what comes before the sampler, text encoders above all."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Sequence

from comfy_execution.utils import get_executing_context

from ...parallel_backend.devices import is_cpu, machine_of
from ...parallel_backend.errors import ParallelError
from ...parallel_backend.planner.rules import StrategySettings
from ...parallel_backend.planner.workload.checkpoint_model import CheckpointModel
from ...parallel_backend.planner.workload.workload import Job
from ...parallel_backend.sidecar import pool
from ..host.calls import plan_by_rule
from ..host.settings import setting
from ..links import ParallelModel

_SPARE_CORES = 2  # for ComfyUI itself, while each process imports on a core of its own

log = logging.getLogger(__name__)


def start_early(model: ParallelModel, settings: StrategySettings) -> None:
    """Starts the processes that a usual job of `model` takes, in a thread, where the node of a running prompt names it
    and the setting allows it. Weights are loaded when the sampler asks for them; text encoders leave room for them."""
    if get_executing_context() is not None and setting("preload_next"):
        threading.Thread(
            target=_start, args=(model, settings), name="parallel-early-start", daemon=True
        ).start()


def _start(model: ParallelModel, settings: StrategySettings) -> None:
    try:
        plan = plan_by_rule(settings, Job(CheckpointModel(model.file, model.spec.weight_dtype)))
        pool.leave_room_for(plan.devices, model.spec, plan.memory.weights)
        if has_cores(plan.devices):
            pool.prepare(plan.devices, model.spec)
    except ParallelError as error:  # which the sampler will meet, and tell
        log.info("parallel sampling: no process was started early: %s", error)
    except Exception:
        log.warning("parallel sampling: no process was started early", exc_info=True)


def has_cores(devices: Sequence[str]) -> bool:
    """Returns True for GPUs of this computer with a core for each process. On the CPU processes would take what the
    nodes before the sampler compute with."""
    is_local_gpu = not is_cpu(devices) and not any(map(machine_of, devices))
    return is_local_gpu and len(os.sched_getaffinity(0)) >= len(devices) + _SPARE_CORES
