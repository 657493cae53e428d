"""A sampler's run with those of the next waiting prompts that differ by their seed: each device takes whole images.

Each prompt keeps its place in ComfyUI's queue and whatever else it does; when its turn comes, its sampler finds what it
would have computed.
"""

from __future__ import annotations

from dataclasses import replace

import comfy.model_management
from comfy_execution.utils import get_executing_context
from torch import Tensor

from ...parallel_backend.devices import name_devices
from ...parallel_backend.errors import Cancelled, ParallelError
from ...parallel_backend.machine.local import joinable, topology_of
from ...parallel_backend.machine.probe import visible_topology
from ...parallel_backend.planner.decide import find_machine
from ...parallel_backend.planner.job_models import CheckpointModel
from ...parallel_backend.planner.rules import StrategySettings
from ...parallel_backend.strategy import ParallelStrategy
from ..host.calls import RunRecord, report_progress
from ..host.memory import memory_flag
from ..host.settings import setting
from ..model.unsupported import RunsStepwise
from ..sampling_job import SamplingJob
from .alike import Waiting, alike, why_alone, why_not_rows
from .kept import MOST_BYTES, Ahead, KeptLatents, Key
from .queue import queued_prompts, running_prompt, waiting_prompts

SETTING = "one_image_per_gpu"
TAKEN = "computed at once with the prompt before it; the times are those of that run"
_NOTHING_HOLDS = (
    "a node before the sampler gives something else each time, or ComfyUI's node cache was emptied, so what was "
    "computed ahead did not hold; it is tried again once the queue was empty"
)

_kept = KeptLatents(queued_prompts)


def sample(job: SamplingJob, settings: StrategySettings, record: RunRecord) -> tuple[Tensor, RunRecord]:
    """The samples that the job gives, and the record of the run that they come from; `record` is of a run alone."""
    context = get_executing_context()
    if context is not None:
        key = (context.prompt_id, context.node_id)
        if (ahead := _kept.take(key, job)) is not None:
            return ahead.samples, replace(ahead.record, notes=[*ahead.record.notes, TAKEN])
        if (
            job.denoise > 0
            and setting(SETTING)
            and (found := _at_once(job, settings, record, key)) is not None
        ):
            return found
    return job.run(settings, record), record


def _at_once(
    job: SamplingJob, settings: StrategySettings, record: RunRecord, key: Key
) -> tuple[Tensor, RunRecord] | None:
    """As `sample`, with the prompts that wait; None where this one runs alone: `record` says why, where others wait."""
    prompt_id, node = key
    waiting = _waiting(key, job)
    why = _NOTHING_HOLDS if _kept.has_missed(node) else ""
    if waiting and not why:
        why = _why_alone(job, settings) or _kept_is_full(job, len(waiting))
    together = None if why or not waiting else _split(job, settings, len(waiting))
    if together is not None:
        others = waiting[: together.strategy.data_degree - 1]
        try:
            return _run(job, together, RunRecord(price_per_hour=record.price_per_hour), node, others)
        except (ParallelError, RunsStepwise, comfy.model_management.OOM_EXCEPTION) as error:
            if isinstance(error, Cancelled):
                raise
            why = " ".join(str(error).split())
            _kept.leave_alone([prompt_id, *(one.prompt_id for one in others)])
    if why:
        record.notes.append(f"one image per GPU was not possible, so this prompt ran alone: {why}")
    return None


def _run(
    job: SamplingJob, settings: StrategySettings, record: RunRecord, node: str, others: list[Waiting]
) -> tuple[Tensor, RunRecord]:
    count, each = 1 + len(others), settings.strategy.world_size // settings.strategy.data_degree
    share = "one image per GPU" if each == 1 else f"one image per {each} GPUs"
    report_progress(f"{count} prompts at once, {share}")
    record.notes = [f"{count} prompts that differ by their seed were computed at once, {share}"]
    samples = job.run(settings, record, [one.seed for one in others])
    if record.decisions:
        why = f"{record.name_of(settings.strategy)}: {share}, for {count} prompts"
        record.decisions[-1] = replace(record.decisions[-1], reason=why)
    for row, one in enumerate(others, start=1):
        own = samples[row : row + 1].clone()  # else each would keep those of all
        _kept.keep((one.prompt_id, node), Ahead(job, one.seed, own, record))
    return samples[:1].clone(), record


def _waiting(key: Key, job: SamplingJob) -> list[Waiting]:
    """The prompts whose sampler may be computed with that of this one."""
    prompt_id, node = key
    passed = _kept.passed(node, job)
    prompt = running_prompt(prompt_id)
    if prompt is None or prompt_id in passed:
        return []
    return alike(prompt, node, waiting_prompts(), passed)


def _why_alone(job: SamplingJob, settings: StrategySettings) -> str:
    """Why this job is computed alone, in a user's words; "" where it need not be."""
    if settings.mode == "manual" and not settings.strategy.exact:
        return "PipeFusion is set by hand, which is approximate"
    latent = job.latent_image
    samples, mask = latent["samples"], latent.get("noise_mask")
    if samples.is_nested or len(samples) != 1 or (mask is not None and mask.ndim > 2 and len(mask) != 1):
        return "its latent is a batch itself, or has sound beside the picture"
    inputs = {"sampler_name": job.sampler_name, "step_cache": job.step_cache}
    return why_alone(inputs) or why_not_rows(job.positive) or why_not_rows(job.negative)


def _kept_is_full(job: SamplingJob, count: int) -> str:
    samples = job.latent_image["samples"]
    wanted = count * samples.numel() * samples.element_size()
    return "too many latents wait for their prompts" if _kept.bytes + wanted > MOST_BYTES else ""


def _split(job: SamplingJob, settings: StrategySettings, waiting: int) -> StrategySettings | None:
    """As many whole images at once as there are prompts for, on all devices of the job, so that its ranks stay. None
    where that would be one."""
    devices = find_machine(settings, memory_flag()).devices
    devices = devices[: joinable(topology_of(devices, visible_topology()), len(devices))]
    count = len(devices)
    images = max(n for n in range(1, count + 1) if count % n == 0 and n <= 1 + waiting)
    ulysses, ring = CheckpointModel(job.parallel_model.file).shape.split_sequence(count // images)
    strategy = ParallelStrategy(data_degree=images, ring_degree=ring, ulysses_degree=ulysses)
    if images == 1 or strategy.world_size != count:
        return None
    return StrategySettings("manual", name_devices(devices), strategy, engine=settings.engine)
