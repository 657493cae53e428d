"""What a choice will do, told before a run: in words, device by device, and how much memory it will take."""

from __future__ import annotations

from dataclasses import dataclass

from ...devices import is_cpu
from ...errors import StrategyError
from ...models.flux.checkpoint import FluxFile
from ...models.flux.keys import FLUX_DEV
from ...sidecar.device_health import left_out
from ...strategy import ModelShape, ParallelStrategy, RequestShape
from ..decide import devices_in_use
from ..memory.fit import MemoryCheck, check_capacity, fits
from ..memory.model import Job, fullest_rank, predict_memory
from ..rules import StrategySettings, resolve
from .rank_diagram import DeviceAssignment, seats_of

# Stands for the model where nobody knows it; a published file is as large as its 12 billion parameters in bf16.
FLUX = FluxFile("Flux.1", "original", "", FLUX_DEV, "bfloat16", tensor_bytes=23_800_000_000)
_SQUARE = Job(height=128, width=128)  # latent pixels
_SIZE = "1024x1024"
# Any model: zero heads divide by everything, so only the rules that hold for each count.
_ANY_MODEL = ModelShape(heads=0, blocks=0)
# A request that gives every degree something to do.
_ANY_REQUEST = RequestShape(batch=64, has_cfg=True)


@dataclass(frozen=True)
class Case:
    """One way it will run. `title`: for which requests; `seats`: all selected devices."""

    title: str
    strategy: ParallelStrategy
    seats: tuple[DeviceAssignment, ...]


@dataclass(frozen=True)
class Preview:
    """`why`: everything in words, as the node's output says it; `basis`: what the cases go by; `memory`: of the
    fullest device."""

    why: str
    basis: str
    cases: tuple[Case, ...]
    notes: tuple[str, ...]
    memory: str


def preview(choice: StrategySettings, file: FluxFile | None = None, weight_dtype: str = "auto") -> Preview:
    """Raises StrategyError or DeviceError for what cannot run: with `file`, by that model's own rules too.

    Without, `manual` is held to the rules of any model, and `auto` and the memory are told for Flux.1.
    """
    devices, failing = devices_in_use(choice)
    if choice.mode == "manual":
        return _manual(choice, devices, file, weight_dtype)
    return _auto(choice, devices, failing, file, weight_dtype)


def _manual(
    choice: StrategySettings, devices: tuple[str, ...], file: FluxFile | None, weight_dtype: str
) -> Preview:
    decision = resolve(choice, _ANY_MODEL if file is None else file.shape, _ANY_REQUEST, devices)
    strategy, model = decision.strategy, file or FLUX
    notes = decision.notes
    memory = _memory(model, weight_dtype, strategy, devices)
    said = f"{strategy.describe()} on {', '.join(devices)}, set by hand"
    why = ". ".join([said, *(note.rstrip(".") for note in notes), memory]) + "."
    if file is not None:
        notes += _capacity(model, weight_dtype, strategy, devices)
    title = strategy.describe()
    if strategy.data_degree > 1:
        title += f", for {strategy.data_degree} images or more"
    return Preview(
        why, "Set by hand", (Case(title, strategy, seats_of(strategy, devices, model.dims)),), notes, memory
    )


def _auto(
    choice: StrategySettings,
    devices: tuple[str, ...],
    failing: tuple[str, ...],
    file: FluxFile | None,
    weight_dtype: str,
) -> Preview:
    model = file or FLUX
    plain, with_cfg = (
        resolve(choice, model.shape, RequestShape(batch=1, has_cfg=has_cfg), devices)
        for has_cfg in (False, True)
    )
    memory = _memory(model, weight_dtype, plain.strategy, devices)
    alike = plain.strategy == with_cfg.strategy
    said = [f"auto on {', '.join(devices)}"]
    if alike:
        said.append(f"By the rule for {model.name}: {plain.reason}")
    else:
        said.append(f"By the rule for {model.name} without a negative prompt: {plain.reason}")
        said.append(f"With one: {with_cfg.reason}")
    notes = tuple(dict.fromkeys([*([left_out(failing)] if failing else []), *plain.notes, *with_cfg.notes]))
    if file is not None and not fits(MemoryCheck(model, weight_dtype, plain.strategy, _SQUARE, devices)):
        notes += (
            f"At {_SIZE} that does not fit in the memory of these devices: auto then shards the weights or keeps "
            f"them in host memory.",
        )
    if alike:
        cases = [("With or without a negative prompt", plain.strategy, 1)]
    else:
        cases = [
            ("Without a negative prompt", plain.strategy, 1),
            ("With a negative prompt", with_cfg.strategy, 2),
        ]
    return Preview(
        ". ".join([*said, memory]) + ".",
        f"By the rule for {model.name}; what was measured may choose otherwise in a run",
        tuple(
            Case(f"{title}: {s.describe()}", s, seats_of(s, devices, model.dims, images=1, prompts=prompts))
            for title, s, prompts in cases
        ),
        notes,
        memory,
    )


def _memory(model: FluxFile, weight_dtype: str, strategy: ParallelStrategy, devices: tuple[str, ...]) -> str:
    memories = predict_memory(
        model.dims, model.dtype, strategy, _SQUARE, weight_dtype=weight_dtype, on_cpu=is_cpu(devices)
    )
    dtype = model.dtype if weight_dtype == "auto" else weight_dtype
    fullest = fullest_rank(memories).describe()
    return f"Predicted for {model.name} in {dtype} at {_SIZE}: {fullest} on the fullest device"


def _capacity(
    model: FluxFile, weight_dtype: str, strategy: ParallelStrategy, devices: tuple[str, ...]
) -> tuple[str, ...]:
    try:
        check_capacity(MemoryCheck(model, weight_dtype, strategy, _SQUARE, devices[: strategy.world_size]))
    except StrategyError as error:
        return (f"At {_SIZE}: {error}",)
    return ()
