"""Checks Strategy Selector's inputs, which ComfyUI's page sends while a person edits, and returns what to show."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, replace

from ...errors import (
    CheckpointError,
    ParallelError,
    Problem,
    RequestError,
    SettingsError,
    StrategyError,
    TransportError,
)
from ...models.model_file import ModelFile
from ...planner.rules import StrategySettings
from ...requests import WEIGHT_DTYPES
from ...strategy import DEGREES, ParallelStrategy
from ...wire.strict_json import from_json, shown
from .preview import PIXELS, Preview, preview

MOST_BYTES = 16 * 1024  # of a request body; all inputs together take a tenth of it
_MOST_LETTERS = 1000  # of one input
# Smallest and largest value of each whole-number input.
LIMITS = {**dict.fromkeys(DEGREES, (1, 64)), "num_pipeline_patch": (0, 1024), "warmup_steps": (0, 10000)}
_PIXELS = {"ParallelDemoLoader": 128}  # image sides of a loader's model, if not preview.PIXELS
_OF_SEQUENCE = {"ring_degree", "ulysses_degree"}  # inputs that split the tokens of one image
# Inputs that make up the strategy in `manual`. Only `auto` uses the exchange variants.
_OF_STRATEGY = tuple(
    f.name for f in fields(ParallelStrategy) if f.name not in ("device_shares", "head_groups", "sends_tokens")
)


@dataclass(frozen=True)
class SelectorInputs:
    """Every input of Strategy Selector, with its default."""

    mode: str = "auto"
    devices: str = "all"
    cfg_degree: int = 1
    pipefusion_degree: int = 1
    ring_degree: int = 1
    ulysses_degree: int = 1
    data_degree: int = 1
    engine: str = "auto"
    tensor_degree: int = 1
    shard_weights: bool = False
    offload_weights: bool = False
    num_pipeline_patch: int = 0
    warmup_steps: int = 1
    device_shares: str = ""
    approximation: str = "if_needed"

    @classmethod
    def of(cls, settings: StrategySettings) -> SelectorInputs:
        """Returns the inputs that give `settings`, with the degrees as they were set."""
        given = {name: getattr(settings.strategy, name) for name in _OF_STRATEGY}
        other_inputs = ("mode", "devices", "engine", "device_shares", "approximation")
        return cls(**given, **{name: getattr(settings, name) for name in other_inputs})

    def settings(self) -> StrategySettings:
        """Returns the settings. Raises StrategyError for an unknown choice, or a number out of range."""
        for name, (least, most) in LIMITS.items():
            if not least <= (value := getattr(self, name)) <= most:
                problem = f"{name} is {shown(value)}; it must be from {least} to {most}."
                raise StrategyError(problem, inputs=(name,))
        strategy = ParallelStrategy(**{name: getattr(self, name) for name in _OF_STRATEGY})
        return StrategySettings(
            self.mode, self.devices, strategy, self.engine, self.device_shares, self.approximation
        )


@dataclass(frozen=True)
class Loader:
    """The node that loads the model, with its inputs. `node`: its class, empty if there is none; `source`: the class of
    a ComfyUI loader in front of it, which then names the file."""

    node: str = ""
    unet_name: str = ""
    weight_dtype: str = "auto"
    source: str = ""


@dataclass(frozen=True)
class FormRequest:
    """The body of a request."""

    inputs: SelectorInputs = SelectorInputs()
    loader: Loader = Loader()


def read_request(body: object) -> FormRequest:
    """Reads parsed JSON as a FormRequest; what it lacks has its default. Raises RequestError for an unknown field, a
    wrong type or a long text."""
    try:
        found = from_json(_filled(body, asdict(FormRequest())), FormRequest, "the body")
    except (TransportError, RecursionError) as error:
        raise RequestError(str(error)) from None
    for name, value in (asdict(found.inputs) | asdict(found.loader)).items():
        if isinstance(value, str) and len(value) > _MOST_LETTERS:
            raise RequestError(f"{name} has {len(value)} letters; at most {_MOST_LETTERS} are read.")
    return found


def _filled(value: object, defaults: object) -> object:
    """Returns JSON with the fields of `defaults` that it lacks."""
    if not isinstance(value, dict) or not isinstance(defaults, dict):
        return value
    given = {name: _filled(one, defaults.get(name)) for name, one in value.items()}
    return given | {name: default for name, default in defaults.items() if name not in given}


def check_inputs(
    inputs: SelectorInputs, loader: Loader, find_file: Callable[[str, str, str], ModelFile | None]
) -> dict[str, object]:
    """Returns the page's content as JSON: `problems` to mark, else `why`, `basis`, `layout`, `notes` and `memory`.

    `nearest`: the inputs to change and their new values, for the nearest settings that can run; empty if unknown.
    `decided`: inputs that have no effect because `auto` decides them. Without a model file, only the rules of any model
    count, as in `find_problems`.

    `find_file(node, unet_name, source)`: returns a loader's model file, None for an unknown loader; may raise
    CheckpointError.
    """
    notes: tuple[str, ...] = ()
    file = None
    try:
        file = find_file(loader.node, loader.unet_name, loader.source)
    except (CheckpointError, RequestError, OSError) as error:
        notes = (f"Checked by the rules of any model, since this one cannot be read: {error}",)
    dtype = loader.weight_dtype if file and loader.weight_dtype in WEIGHT_DTYPES else "auto"
    try:
        pixels = _PIXELS.get(loader.node, PIXELS)
        previewed = preview(inputs.settings(), file, dtype, pixels)
    except ParallelError as error:
        return _answer(inputs, Preview(notes=notes), _problems(error, file))
    return _answer(inputs, replace(previewed, notes=notes + previewed.notes))


def find_problems(inputs: SelectorInputs, files: Sequence[ModelFile] = ()) -> tuple[Problem, ...]:
    """Returns what is wrong with the inputs for any of the models in `files`. Without `files`, returns only what is
    wrong for every model."""
    found: dict[str, Problem] = {}
    for file in files or (None,):
        try:
            preview(inputs.settings(), file)
        except ParallelError as error:
            found |= {problem.message: problem for problem in _problems(error, file)}
    return tuple(found.values())


def _problems(error: ParallelError, file: ModelFile | None) -> tuple[Problem, ...]:
    if not isinstance(error, SettingsError):
        return (Problem(str(error)),)
    why = "" if file is None else file.why_less
    return tuple(
        replace(p, message=f"{p.message} The reason: {why}.") if why and _OF_SEQUENCE & set(p.inputs) else p
        for p in error.problems
    )


def _answer(
    inputs: SelectorInputs, previewed: Preview, problems: Sequence[Problem] = ()
) -> dict[str, object]:
    return {
        "decided": list(_OF_STRATEGY) if inputs.mode == "auto" else [],
        "problems": [{"inputs": list(p.inputs), "message": p.message} for p in problems],
        "nearest": dict(change for p in problems for change in p.nearest),
        **vars(previewed),
    }
