"""The closed set of messages between ComfyUI's process and a rank, and their strict JSON form.

One datagram holds one envelope: {"version", "epoch", "request", "op", "body"}. `epoch` counts the starts of a group,
`request` the requests since then, so that late messages of earlier ones are recognised and dropped. Tensors are sent in
a sealed memfd with the datagram (transport.py).
"""

from __future__ import annotations

import json
import typing
from dataclasses import dataclass

from ..errors import TransportError
from ..requests import ComfyUISource, FileContent, LoadInfo, ModelSpec, Placement, RunInfo
from ..strategy import ParallelStrategy
from ..trials import NO_TRIALS, TrialPlan
from .calibration import Calibration
from .checks.findings import CheckSubject, Finding, SelfTest
from .strict_json import from_json, parse, shown, to_json

VERSION = 27
MAX_MESSAGE_BYTES = 64 * 1024  # SEQPACKET takes 192 KiB; 256 KiB gives EMSGSIZE (measured)
ALL_RANKS = -1  # value of `rank` if all ranks compute
NO_REQUEST = 0  # `request` of the handshake; requests count from 1
SHARED_STORE = "torchrun:"  # begins a rendezvous in torchrun's store; the group's own prefix follows


class OtherVersion(TransportError):
    """Raised for a message of another version of the pack."""


@dataclass(frozen=True)
class Hello:
    """Rank to parent, first message: the rank's versions of Python and torch."""

    python: str
    torch: str


@dataclass(frozen=True)
class Setup:
    """Parent to rank: its place in the group. `devices`: of all ranks, in rank order; `rendezvous`: path of the
    FileStore, an inherited memfd, or, for ranks on several machines, SHARED_STORE and the group's own prefix in
    torchrun's store; `deterministic`: torch's setting in the parent (ComfyUI's --deterministic)."""

    rank: int
    devices: tuple[str, ...]
    rendezvous: str
    deterministic: bool = False


@dataclass(frozen=True)
class Load:
    """Parent to all ranks: load a model and hold it under the number `model`. `spec`: the file, of which each rank
    loads the part that `strategy.weights` gives it; None if the payload has a text encoder or half a VAE
    (job/payload.py). `keep`: models to hold besides it. Others are dropped before the load; these only if memory runs
    out, in this order. `yields`: True if the load then fails instead. `content`: lets ranks on other machines find the
    file in their own folders. For a model in the payload, `rank`: the rank that computes it, or ALL_RANKS if all do;
    `comfyui`: the ComfyUI whose module it is."""

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
    """Parent to all ranks: hold these models and no others, and free the device memory that torch caches. The answer
    lists the models that are held then."""

    models: tuple[int, ...]


@dataclass(frozen=True)
class Prepare:
    """Parent to all ranks: import what loading this model needs, but read and hold nothing."""

    spec: ModelSpec


@dataclass(frozen=True)
class ProveClasses:
    """Parent to the only rank: test classes of this ComfyUI against the table of classes. It holds no model."""

    comfyui: ComfyUISource
    names: tuple[str, ...]


@dataclass(frozen=True)
class RankModels:
    """The numbers of all models that a rank holds. `free_bytes`, `total_bytes`: memory of its accelerator, which other
    programs share; 0 on the CPU."""

    models: tuple[int, ...]
    free_bytes: int = 0
    total_bytes: int = 0


@dataclass(frozen=True)
class RunJob:
    """Parent to all ranks: run a job shipped whole from ComfyUI's process (job/payload.py) on the held model number
    `model`, for `steps` steps. If it is resumed, the payload has the earlier calls' answers. `placement`: None for a
    text encoder or VAE, whose placement is set at its load; `previews`: True to send denoised latents; `trials`:
    strategies to try while it runs; `cfg`: of a plain job, whose tensors are the payload; None for any other."""

    placement: Placement | None
    steps: int
    previews: bool = False
    model: int = 0
    trials: TrialPlan = NO_TRIALS
    cfg: float | None = None


@dataclass(frozen=True)
class Calibrate:
    """Parent to all ranks: measure the links in the groups of `strategy`, in about `budget_s` seconds.

    `thorough`: True to also measure each pair of ranks, compare received with sent data, and test the attention kernel.
    """

    strategy: ParallelStrategy
    budget_s: float
    thorough: bool


@dataclass(frozen=True)
class RunCheck:
    """Parent to all ranks: run the check `name` of the GPU check, one that looks at the ranks themselves."""

    name: str
    subject: CheckSubject


@dataclass(frozen=True)
class MoveOut:
    """Parent to all ranks: `rank` frees the device memory of model number `model`. Weights that differ from the file's
    go to host memory, and the others are read again later."""

    rank: int
    model: int


@dataclass(frozen=True)
class TakeBack:
    """Parent to all ranks: undo MoveOut for all models that fit on the device."""


@dataclass(frozen=True)
class Cancel:
    """Parent to rank 0, or to the only rank that computes: end the envelope's request at its next step boundary."""


@dataclass(frozen=True)
class Progress:
    """Rank 0 to parent: `step` (1-based) of `steps` took `seconds`; the payload, if any, has the denoised preview
    or the sampler's state. `strategy`: index of the step's strategy, 0 for the placement's (RunJob.trials)."""

    step: int
    steps: int
    seconds: float
    strategy: int = 0


@dataclass(frozen=True)
class Compiling:
    """Rank to parent: it starts to compile a part of the model for the running request."""


@dataclass(frozen=True)
class RankCall:
    """One rank's record of a job on a text encoder or VAE. `bytes_sent`: in collectives. For a VAE, `parts`: rows of
    each latent, or tiles, that it computed; `peak_bytes`: device memory beyond what was in use before, 0 on the
    CPU; `notes`: on what cannot be sent back."""

    seconds: float
    bytes_sent: int
    parts: int = 0
    peak_bytes: int = 0
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Done:
    """Rank to parent, terminal: the request succeeded, or the process group is ready. Rank 0's carries the result
    tensors. `models`: set if the request may have changed which models are held; `run`: for this rank alone, without
    the times of its steps."""

    load: LoadInfo | None = None
    models: RankModels | None = None
    proofs: tuple[SelfTest, ...] | None = None
    run: RunInfo | None = None
    calibration: Calibration | None = None
    call: RankCall | None = None
    findings: tuple[Finding, ...] | None = None


@dataclass(frozen=True)
class Failed:
    """Rank to parent, terminal: the request ended with an error.

    `kind`: name of an error in errors.py, "RankFailed", or PEER_FAILED; `detail`: the last traceback lines; `device`:
    the device, for a DeviceError.
    """

    kind: str
    message: str
    detail: str
    device: str | None = None


# `kind` of a rank that stopped its own part because another rank could not do its part.
PEER_FAILED = "PeerFailed"

Message = (
    Hello
    | Setup
    | Load
    | KeepModels
    | Prepare
    | ProveClasses
    | RunJob
    | Calibrate
    | RunCheck
    | MoveOut
    | TakeBack
    | Cancel
    | Progress
    | Compiling
    | Done
    | Failed
)
_MESSAGES = {kind.__name__: kind for kind in typing.get_args(Message)}
# How many payloads (file descriptors) each message may have; messages not listed have none.
_PAYLOADS: dict[type, tuple[int, ...]] = {
    RunJob: (1,),
    **dict.fromkeys((Load, Progress, Done), (0, 1)),
}


@dataclass(frozen=True)
class Envelope:
    """One message, with the group start and the request that it belongs to."""

    epoch: int
    request: int
    message: Message


def encode(envelope: Envelope) -> bytes:
    """Returns the datagram of `envelope`. Raises TransportError if it is over MAX_MESSAGE_BYTES."""
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
    """Returns the envelope in a datagram with `payloads` descriptors. Raises TransportError on any deviation."""
    if len(data) > MAX_MESSAGE_BYTES:
        raise TransportError(f"a message has {len(data)} bytes; the limit is {MAX_MESSAGE_BYTES}")
    try:
        frame = parse(data.decode())
    except (ValueError, RecursionError) as error:
        raise TransportError(f"a message is not valid JSON: {error}") from None
    if not isinstance(frame, dict) or frame.get("version") != VERSION:
        found = frame.get("version") if isinstance(frame, dict) else None
        raise OtherVersion(f"a message has protocol version {found!r}, and this side has {VERSION}")
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
