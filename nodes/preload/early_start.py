"""Starts the processes of a prompt when a node names its model: they import torch and ComfyUI, which takes some ten
seconds, while ComfyUI runs the nodes before the sampler, mainly text encoders."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence

from comfy_execution.utils import get_executing_context

from ...parallel_backend.devices import is_cpu, machine_of
from ...parallel_backend.errors import ParallelError
from ...parallel_backend.machine.fingerprint import cores
from ...parallel_backend.planner.rules import StrategySettings
from ...parallel_backend.planner.workload.checkpoint_model import CheckpointModel
from ...parallel_backend.planner.workload.workload import Job
from ...parallel_backend.sidecar import pool
from ..host.calls import plan_by_rule
from ..host.settings import setting
from ..job.model import ShippedModel

_SPARE_CORES = 2  # for ComfyUI itself; each process imports on a core of its own

log = logging.getLogger(__name__)


def start_early(model: ShippedModel, settings: StrategySettings) -> None:
    """Starts in a thread the processes that a usual job of `model` takes, if a prompt is running and the setting
    preload_next allows it. The sampler's request loads the weights; text encoders leave room for them."""
    if get_executing_context() is not None and setting("preload_next"):
        threading.Thread(
            target=_start, args=(model, settings), name="parallel-early-start", daemon=True
        ).start()


def _start(model: ShippedModel, settings: StrategySettings) -> None:
    try:
        plan = plan_by_rule(settings, Job(CheckpointModel(model.file, model.spec.weight_dtype)))
        pool.leave_room_for(plan.devices, model.spec, plan.memory.weights)
        if has_cores(plan.devices):
            pool.prepare(plan.devices, model.spec)
    except ParallelError as error:  # the sampler will raise the same error
        log.info("parallel sampling: no process was started early: %s", error)
    except Exception:
        log.warning("parallel sampling: no process was started early", exc_info=True)


def has_cores(devices: Sequence[str]) -> bool:
    """Returns True for GPUs of this computer with a core for each process and some to spare. Processes on the CPU would
    take cores from the nodes before the sampler."""
    is_local_gpu = not is_cpu(devices) and not any(map(machine_of, devices))
    return is_local_gpu and cores() >= len(devices) + _SPARE_CORES
