"""Previews what settings will do: in words, device by device, and with the memory needed."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from ...devices import is_cpu
from ...errors import StrategyError
from ...machine.local import LocalMachine
from ...models.comfyui.model_file import ANY_MODEL, TYPICAL
from ...models.diffusers.checkpoint import PUBLISHED_DEV
from ...models.model_file import ModelFile
from ...planner.plan import find_machine
from ...planner.rules import StrategySettings, resolve_strategy
from ...planner.workload.checkpoint_model import CheckpointModel
from ...planner.workload.fit import MemoryCheck, check_capacity
from ...planner.workload.workload import Job
from ...sidecar.group.failures import left_out
from ...strategy import ModelShape, ParallelStrategy
from ..panel import Shown
from .rank_diagram import assign_devices

PIXELS = 1024  # sides of the image that memory is predicted for


@dataclass(frozen=True)
class _AnyModel(CheckpointModel):
    """An unknown model: zero heads divide by everything, so only rules that hold for any count apply."""

    @property
    def shape(self) -> ModelShape:
        return ModelShape(heads=0, blocks=0)


_ANY_JOB = Job(_AnyModel(TYPICAL), batch=64, prompts=2)  # gives every degree something to do


ONE_CPU = "cpu:1"  # a number of ranks, although it looks like the second rank's name
CPU_COUNT = (
    "cpu:1 asks for one process on the CPU, which is called cpu:0; cpu:2 asks for two, cpu:0 and cpu:1."
)


@dataclass(frozen=True)
class Preview:
    """The preview of settings. `why`: everything in words, as in the node's output; `basis`: what the layout depends
    on; `layout`: {"title": for which requests, "seats": as from assign_devices} for each way in which they may run;
    `memory`: of the fullest device, in words, "" for an unknown model."""

    why: str = ""
    basis: str = ""
    layout: list[Shown] = field(default_factory=list)
    notes: tuple[str, ...] = ()
    memory: str = ""


def preview(
    settings: StrategySettings,
    file: ModelFile | None = None,
    weight_dtype: str = "auto",
    pixels: int = PIXELS,
) -> Preview:
    """Returns the preview. Raises StrategyError or DeviceError for settings that cannot run, also by `file`'s rules.

    Without `file`, `manual` must obey the rules of any model, `auto` is shown for a typical one, and `why` does not
    mention memory. `pixels`: sides of the images that the model makes.
    """
    machine = find_machine(settings.devices, in_order=settings.fixes_order)
    model = CheckpointModel(file or PUBLISHED_DEV, weight_dtype)
    if settings.mode == "manual":
        ruled = _ANY_JOB if file is None else replace(_ANY_JOB, model=model)
        found, strategy = _manual(settings, machine, model, ruled)
    else:
        found, strategy = _auto(settings, machine, model)
    if file is not None and file is not ANY_MODEL:
        job = Job(model, width=pixels, height=pixels, steps=20, text=512)
        check = MemoryCheck.on(job, strategy, machine.devices)
        memory = _memory(check)
        why = ". ".join([found.why, *(line.rstrip(".") for line in memory.splitlines())])
        found = replace(found, why=why, memory=memory, notes=found.notes + _lacks(check, settings))
    notes = (CPU_COUNT,) if settings.devices.strip().lower() == ONE_CPU else ()
    return replace(found, why=f"{found.why}.", notes=notes + found.notes)


def _manual(
    settings: StrategySettings, machine: LocalMachine, model: CheckpointModel, ruled: Job
) -> tuple[Preview, ParallelStrategy]:
    """Returns the preview without memory, and the strategy. `ruled`: the job by whose rules the settings count."""
    decision = resolve_strategy(settings, ruled, machine.devices)
    strategy, notes = decision.strategy, decision.notes
    title = model.shape.describe(strategy)
    summary = f"{title} on {', '.join(machine.devices)}, set by hand"
    if strategy.data_degree > 1:
        title += f", for {strategy.data_degree} images or more"
    seats = assign_devices(strategy, machine.devices, model.file)
    why = ". ".join([summary, *(note.rstrip(".") for note in notes)])
    return Preview(why, "Set by hand", [{"title": title, "seats": seats}], notes), strategy


def _auto(
    settings: StrategySettings, machine: LocalMachine, model: CheckpointModel
) -> tuple[Preview, ParallelStrategy]:
    """Returns the preview without memory, and the strategy without a negative prompt."""
    plain, with_cfg = (
        resolve_strategy(settings, Job(model, prompts=prompts), machine.devices) for prompts in (1, 2)
    )
    name = model.file.name
    sentences = [f"auto on {', '.join(machine.devices)}"]
    cases = [("With or without a negative prompt", plain.strategy, 1)]
    if plain.strategy == with_cfg.strategy:
        sentences.append(f"Plan for {name}: {plain.reason}")
    else:
        sentences.append(f"Plan for {name} without a negative prompt: {plain.reason}")
        sentences.append(f"With one: {with_cfg.reason}")
        cases = [
            ("Without a negative prompt", plain.strategy, 1),
            ("With a negative prompt", with_cfg.strategy, 2),
        ]
    left = [left_out(machine.failing)] if machine.failing else []
    layout: list[Shown] = [
        {
            "title": f"{title}: {model.shape.describe(strategy)}",
            "seats": assign_devices(strategy, machine.devices, model.file, images=1, prompts=prompts),
        }
        for title, strategy, prompts in cases
    ]
    basis = f"Plan for {name}. The first run measures and may pick a faster one."
    notes = tuple(dict.fromkeys([*left, *plain.notes, *with_cfg.notes]))
    return Preview(". ".join(sentences), basis, layout, notes), plain.strategy


def _memory(check: MemoryCheck) -> str:
    job, fullest, model = check.job, check.fullest, check.job.model
    dtype = model.file.dtype if model.weight_dtype == "auto" else model.weight_dtype
    where = "process" if is_cpu(check.devices) else "GPU"
    return (
        f"{fullest.in_short(where)}\nPredicted for {model.file.name} in {dtype} at {job.width}x{job.height}, on the "
        f"fullest device: {fullest.describe()}"
    )


def _lacks(check: MemoryCheck, settings: StrategySettings) -> tuple[str, ...]:
    """Returns a note if the job does not fit: auto then chooses another strategy, a strategy set by hand fails."""
    size = f"At {check.job.width}x{check.job.height}"
    try:
        check_capacity(check)
    except StrategyError as error:
        if settings.mode == "manual":
            return (f"{size}: {error}",)
        return (
            f"{size} that does not fit in the memory of these devices: auto then shards the weights or keeps them in "
            f"host memory.",
        )
    return ()
