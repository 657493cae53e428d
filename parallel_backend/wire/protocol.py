"""The closed set of messages between ComfyUI's process and a rank, and their strict JSON form.

One datagram holds one envelope: {"version", "epoch", "request", "op", "body"}. `epoch` numbers the starts of a group,
`request` the requests within it, so that a late message of an earlier one is recognised and dropped. Tensors are
a sealed memfd beside the datagram (transport.py).
"""

from __future__ import annotations

import json
import typing
from dataclasses import dataclass

from ..errors import TransportError
from ..options import CompileStats
from ..requests import ComfyUISource, FileContent, LoadInfo, ModelSpec, Placement
from ..strategy import ParallelStrategy
from ..trials import NO_TRIALS, Trial, TrialPlan
from .calibration import Calibration
from .strict_json import from_json, parse, shown, to_json

VERSION = 23
MAX_MESSAGE_BYTES = 64 * 1024  # SEQPACKET takes 192 KiB; 256 KiB gives EMSGSIZE (measured)
ALL_RANKS = -1  # `rank` of what no single one computes
NO_REQUEST = 0  # `request` of the handshake; requests count from 1
SHARED_STORE = "torchrun:"  # before the prefix of a group's own part of torchrun's store


@dataclass(frozen=True)
class Hello:
    """Rank to parent, first message: what runs at the other end. `protocol`: VERSION of the rank's code."""

    protocol: int
    python: str
    torch: str


@dataclass(frozen=True)
class Setup:
    """Parent to rank: who you are. `rendezvous`: path of the FileStore, or SHARED_STORE and a prefix of their own in
    torchrun's store where ranks sit on several machines; `devices`: all of them, in rank order;
    `deterministic`: as torch is set in the parent (ComfyUI's --deterministic)."""

    rank: int
    world_size: int
    devices: tuple[str, ...]
    rendezvous: str
    backend: str
    deterministic: bool = False


@dataclass(frozen=True)
class Load:
    """Parent to all ranks: hold a model under the number `model`: that of a file (`spec`), each rank the part of it
    that `strategy.weights` gives it; or, where spec is None, the text encoder or half a VAE in the payload
    (job/payload.py). `keep`: the models to hold beside it; others go before the load, these only where memory ends, the
    first one first. `yields`: where memory ends they stay, and the load fails. `content`: for ranks of other machines,
    which look for the file in their own folders. Of what is in the payload, `rank`: the one that computes it, ALL_RANKS
    where all of them do; `comfyui`: whose module it is."""

    spec: ModelSpec | None
    strategy: ParallelStrategy
    model: int
    keep: tuple[int, ...]
    yields: bool = False
    content: FileContent | None = None
    rank: int = ALL_RANKS
    comfyui: ComfyUISource | None = None


@dataclass(frozen=True)
class KeepModels:
    """Parent to all ranks: hold these models and no others, and give back what torch keeps of devices beside them; what
    is held then is in the answer."""

    models: tuple[int, ...]


@dataclass(frozen=True)
class Prepare:
    """Parent to all ranks: import what loading this model will need. Nothing is read or held."""

    spec: ModelSpec


@dataclass(frozen=True)
class RankModels:
    """The numbers of all that one rank holds. `free_bytes`, `total_bytes`: of its accelerator, which all programs
    share; 0 on the CPU."""

    models: tuple[int, ...]
    free_bytes: int = 0
    total_bytes: int = 0


@dataclass(frozen=True)
class Sample:
    """Parent to all ranks: a plain sampling job; its tensors are in the payload. `previews`: send denoised latents;
    `model`: the number of a held one."""

    placement: Placement
    cfg: float
    previews: bool
    model: int = 0


@dataclass(frozen=True)
class RunJob:
    """Parent to all ranks: a job as ComfyUI's process has it, whole (job/payload.py), over the model under this number;
    of so many steps, with what earlier model calls gave where it is resumed. `placement`: None over a text encoder or
    VAE, which is placed as it was loaded; `states`: send the loop's states; `trials`: the strategies that it tries on
    its way. Others as in Sample."""

    placement: Placement | None
    steps: int
    previews: bool = False
    states: bool = False
    model: int = 0
    trials: TrialPlan = NO_TRIALS


@dataclass(frozen=True)
class Calibrate:
    """Parent to all ranks: measure the links over the groups of `strategy`, in about `budget_s` seconds.

    `thorough`: also each pair of ranks alone, whether what arrives is what was sent, and the attention kernel.
    """

    strategy: ParallelStrategy
    budget_s: float
    thorough: bool


@dataclass(frozen=True)
class MoveOut:
    """Parent to all ranks: `rank` gives back the memory that the model under the number `model` takes of its device.
    Weights that are not the file's go to host memory, and the others are read again."""

    rank: int
    model: int


@dataclass(frozen=True)
class TakeBack:
    """Parent to all ranks: take back what MoveOut moved, of all models that have room on the device."""


@dataclass(frozen=True)
class Cancel:
    """Parent to rank 0: end the request named in the envelope at its next step boundary."""


@dataclass(frozen=True)
class Progress:
    """Rank 0 to parent: `step` (1-based) of `steps` took `seconds`; the payload, if any, has the denoised preview
    or the sampler's state. `strategy`: the number of the one it ran under, 0 for the placement's (RunJob.trials)."""

    step: int
    steps: int
    seconds: float
    strategy: int = 0


@dataclass(frozen=True)
class Compiling:
    """Rank to parent: it begins to compile a part of the model for the request that runs."""


@dataclass(frozen=True)
class RankRun:
    """The record of a request that one rank ran. `seconds`: from the decoded request to its end; `bytes_sent`:
    collective payload; `exact`: it computed what one device would; `model_calls`, `reused_calls`, `kernel`, `compiled`,
    `trials`: as in RunInfo; `inside_seconds`: of this rank alone."""

    engine: str
    strategy: ParallelStrategy
    seconds: float
    bytes_sent: int
    notes: tuple[str, ...]
    exact: bool = True
    model_calls: int = 0
    reused_calls: int = 0
    kernel: str = "torch"
    compiled: CompileStats | None = None
    trials: tuple[Trial, ...] = ()
    inside_seconds: tuple[float, ...] = ()


@dataclass(frozen=True)
class RankCall:
    """The record of a job over a text encoder or VAE on one rank. `bytes_sent`: collective payload. Of a VAE, `parts`:
    the rows of each latent, or tiles, that it computed; `peak_bytes`: device memory beyond what was in use before, 0 on
    the CPU."""

    seconds: float
    bytes_sent: int
    parts: int = 0
    peak_bytes: int = 0


@dataclass(frozen=True)
class Done:
    """Rank to parent, terminal: the request ended well, or the process group stands. Rank 0's carries the result
    tensors.
    `models`: where the request may have changed which ones are held."""

    load: LoadInfo | None = None
    models: RankModels | None = None
    run: RankRun | None = None
    calibration: Calibration | None = None
    call: RankCall | None = None


@dataclass(frozen=True)
class Failed:
    """Rank to parent, terminal: the request ended with an error.

    `kind`: name of an error in errors.py, "RankFailed", or PEER_FAILED; `detail`: the last traceback lines; `device`:
    of a DeviceError.
    """

    kind: str
    message: str
    detail: str
    device: str | None = None


# `kind` of a rank that did its part but gave it up because another rank could not do its own.
PEER_FAILED = "PeerFailed"

Message = (
    Hello
    | Setup
    | Load
    | KeepModels
    | Prepare
    | Sample
    | RunJob
    | Calibrate
    | MoveOut
    | TakeBack
    | Cancel
    | Progress
    | Compiling
    | Done
    | Failed
)
_MESSAGES = {kind.__name__: kind for kind in typing.get_args(Message)}
# How many payloads (file descriptors) may come with each message; none where it is not listed.
_PAYLOADS: dict[type, tuple[int, ...]] = {
    **dict.fromkeys((Sample, RunJob), (1,)),
    **dict.fromkeys((Load, Progress, Done), (0, 1)),
}


@dataclass(frozen=True)
class Envelope:
    """One message and what it belongs to."""

    epoch: int
    request: int
    message: Message


def encode(envelope: Envelope) -> bytes:
    """The datagram of `envelope`; raises TransportError when it is over MAX_MESSAGE_BYTES."""
    frame = {
        "version": VERSION,
        "epoch": envelope.epoch,
        "request": envelope.request,
        "op": type(envelope.message).__name__,
        "body": to_json(envelope.message),
    }
    data = json.dumps(frame, allow_nan=False, separators=(",", ":")).encode()
    if len(data) > MAX_MESSAGE_BYTES:
        raise TransportError(
            f"a {frame['op']} message has {len(data)} bytes; the limit is {MAX_MESSAGE_BYTES}. "
            "Shorten the path or text it carries."
        )
    return data


def decode(data: bytes, payloads: int = 0) -> Envelope:
    """The envelope in a datagram that came with `payloads` descriptors; raises TransportError on any deviation."""
    if len(data) > MAX_MESSAGE_BYTES:
        raise TransportError(f"a message has {len(data)} bytes; the limit is {MAX_MESSAGE_BYTES}")
    try:
        frame = parse(data.decode())
    except (ValueError, RecursionError) as error:
        raise TransportError(f"a message is not valid JSON: {error}") from None
    if not isinstance(frame, dict) or frame.get("version") != VERSION:
        found = frame.get("version") if isinstance(frame, dict) else None
        raise TransportError(f"a message has protocol version {found!r}; this side speaks {VERSION}")
    if set(frame) != {"version", "epoch", "request", "op", "body"}:
        raise TransportError(f"a message has the wrong fields: {shown(sorted(frame))}")
    kind = _MESSAGES.get(frame["op"]) if isinstance(frame["op"], str) else None
    if kind is None:
        raise TransportError(f"unknown message {shown(frame['op'])}")
    allowed = _PAYLOADS.get(kind, (0,))
    if payloads not in allowed:
        raise TransportError(f"a {kind.__name__} message came with {payloads} payloads; allowed: {allowed}")
    return Envelope(
        epoch=from_json(frame["epoch"], int, "epoch"),
        request=from_json(frame["request"], int, "request"),
        message=from_json(frame["body"], kind, kind.__name__),
    )
