"""Previews what settings will do: in words, device by device, and with the memory needed."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ...errors import StrategyError
from ...machine.local import LocalMachine
from ...models.comfyui.model_file import ANY_MODEL, TYPICAL
from ...models.diffusers.checkpoint import PUBLISHED_DEV
from ...models.model_file import ModelFile
from ...planner.plan import find_machine
from ...planner.rules import StrategySettings, resolve_strategy
from ...planner.workload.checkpoint_model import CheckpointModel
from ...planner.workload.fit import MemoryCheck, check_capacity, fits
from ...planner.workload.workload import Job
from ...sidecar.group.failures import left_out
from ...strategy import ModelShape, ParallelStrategy
from .rank_diagram import DeviceAssignment, assign_devices

PIXELS = 1024  # sides of the image that memory is predicted for


@dataclass(frozen=True)
class _AnyModel(CheckpointModel):
    """An unknown model: zero heads divide by everything, so only rules that hold for any count apply."""

    @property
    def shape(self) -> ModelShape:
        return ModelShape(heads=0, blocks=0)


_ANY_JOB = Job(_AnyModel(TYPICAL), batch=64, prompts=2)  # gives every degree something to do


@dataclass(frozen=True)
class PreviewCase:
    """One way in which settings may run. `title`: for which requests; `assignments`: one for each selected device."""

    title: str
    assignments: tuple[DeviceAssignment, ...]


ONE_CPU = "cpu:1"  # a number of ranks, although it looks like the second rank's name
CPU_COUNT = (
    "cpu:1 asks for one process on the CPU, which is called cpu:0; cpu:2 asks for two, cpu:0 and cpu:1."
)


@dataclass(frozen=True)
class Preview:
    """The preview of settings. `why`: everything in words, as in the node's output; `basis`: what the cases depend on;
    `memory`: of the fullest device, in words."""

    why: str = ""
    basis: str = ""
    cases: tuple[PreviewCase, ...] = ()
    notes: tuple[str, ...] = ()
    memory: str = ""


@dataclass(frozen=True)
class _Subject:
    """The model and image size of a preview. `model`: a typical one if none was given; `has_rules`: True if one was
    given; `is_known`: True if its sizes are also known."""

    model: CheckpointModel
    pixels: int
    has_rules: bool
    is_known: bool

    @property
    def size(self) -> str:
        return f"{self.pixels}x{self.pixels}"

    @property
    def job(self) -> Job:
        return Job(self.model, width=self.pixels, height=self.pixels, steps=20, text=512)


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
    subject = _Subject(model, pixels, file is not None, file is not None and file is not ANY_MODEL)
    preview_mode = _manual if settings.mode == "manual" else _auto
    found = preview_mode(settings, machine, subject)
    if settings.devices.strip().lower() != ONE_CPU:
        return found
    return replace(found, notes=(CPU_COUNT, *found.notes))


def _manual(settings: StrategySettings, machine: LocalMachine, subject: _Subject) -> Preview:
    model = subject.model
    job = replace(_ANY_JOB, model=model) if subject.has_rules else _ANY_JOB
    decision = resolve_strategy(settings, job, machine.devices)
    strategy, notes = decision.strategy, decision.notes
    memory = _memory(subject, strategy, machine)
    summary = f"{model.shape.describe(strategy)} on {', '.join(machine.devices)}, set by hand"
    why = ". ".join([summary, *(note.rstrip(".") for note in notes), *_lines(memory, subject)]) + "."
    if subject.is_known:
        notes += _capacity(subject, strategy, machine)
    title = model.shape.describe(strategy)
    if strategy.data_degree > 1:
        title += f", for {strategy.data_degree} images or more"
    case = PreviewCase(title, assign_devices(strategy, machine.devices, model.file))
    return Preview(why, "Set by hand", (case,), notes, memory)


def _auto(settings: StrategySettings, machine: LocalMachine, subject: _Subject) -> Preview:
    model = subject.model
    plain, with_cfg = (
        resolve_strategy(settings, Job(model, prompts=prompts), machine.devices) for prompts in (1, 2)
    )
    memory = _memory(subject, plain.strategy, machine)
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
    notes = tuple(dict.fromkeys([*left, *plain.notes, *with_cfg.notes]))
    if subject.is_known and not fits(MemoryCheck(subject.job, plain.strategy, machine.devices)):
        notes += (
            f"At {subject.size} that does not fit in the memory of these devices: auto then shards the weights or "
            f"keeps them in host memory.",
        )
    return Preview(
        ". ".join([*sentences, *_lines(memory, subject)]) + ".",
        f"Plan for {name}. The first run measures and may pick a faster one.",
        tuple(
            PreviewCase(
                f"{title}: {model.shape.describe(strategy)}",
                assign_devices(strategy, machine.devices, model.file, images=1, prompts=prompts),
            )
            for title, strategy, prompts in cases
        ),
        notes,
        memory,
    )


def _lines(memory: str, subject: _Subject) -> list[str]:
    return [line.rstrip(".") for line in memory.splitlines()] if subject.is_known else []


def _memory(subject: _Subject, strategy: ParallelStrategy, machine: LocalMachine) -> str:
    model = subject.model
    dtype = model.file.dtype if model.weight_dtype == "auto" else model.weight_dtype
    fullest = MemoryCheck.on(subject.job, strategy, machine.devices).fullest
    where = "process" if machine.on_cpu else "GPU"
    return (
        f"{fullest.in_short(where)}\nPredicted for {model.file.name} in {dtype} at {subject.size}, on the fullest "
        f"device: {fullest.describe()}"
    )


def _capacity(subject: _Subject, strategy: ParallelStrategy, machine: LocalMachine) -> tuple[str, ...]:
    try:
        check_capacity(MemoryCheck.on(subject.job, strategy, machine.devices))
    except StrategyError as error:
        return (f"At {subject.size}: {error}",)
    return ()
