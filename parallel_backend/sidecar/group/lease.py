"""The states of a group of ranks, the lease under which one caller at a time uses them, and its request's phases."""

from __future__ import annotations

import enum
import threading
import time
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field

from ...requests import ModelSpec, RunInfo
from ...strategy import ParallelStrategy
from ...wire import deadlines
from ...wire.file_identity import FileIdentity
from .exchange import USER_ERRORS, Exchange

ShouldCancel = Callable[[], bool]
# ComfyUI's id of the prompt for which the current thread calls the ranks; "" for none.
PROMPT_ID: ContextVar[str] = ContextVar("PROMPT_ID", default="")


class State(enum.Enum):
    """The state of a group. DOWN -> STARTING -> READY <-> RUNNING; READY <-> ASLEEP; any -> FAILED -> STARTING. BROKEN
    after three crashes within ten minutes, until that time has passed or the user resets the group."""

    DOWN = "down"
    STARTING = "starting"
    READY = "ready"
    RUNNING = "running"
    ASLEEP = "asleep"
    FAILED = "failed"
    BROKEN = "broken"


class PhaseKind(enum.Enum):
    """The kind of a phase. The value is its text; {} stands for the subject."""

    STARTING = "starting {}"
    WAKING = "waking the processes"
    LOADING = "loading {}"
    LOADED = "loaded in {} s"
    DROPPED = "{}"  # a model, and why
    SWITCHED = "switched to {}"
    FIRST_STEP = "first step"
    IMPORTING = "importing {}, once"  # packs
    COMPILING = "compiling for {}; this step takes longer"
    TRYING = "trying {}"  # a strategy and its number, such as 2 of 3
    SAMPLING = "sampling"
    SENDING_VAE = "sending the VAE to the processes"
    DECODING = "decoding"
    ENCODING = "encoding"
    SENDING_ENCODER = "sending the text encoder to the processes"
    ENCODING_TEXT = "encoding the text"
    MEASURING = "measuring the links"
    RECOVERING = "{}"  # from a crash
    MAKING_ROOM = "memory ended; going on without the other models"


@dataclass(frozen=True)
class Phase:
    """One phase of a request. `about`: its subject, such as a file's name; `size`: bytes of the file that it reads, 0
    for none (each rank's heartbeat has the progress); `started`: time.monotonic() of its beginning."""

    kind: PhaseKind
    about: str = ""
    size: int = 0
    started: float = field(default_factory=time.monotonic, compare=False)

    @property
    def text(self) -> str:
        return self.kind.value.format(self.about)


OnPhase = Callable[[Phase], None]
ShowPhase = Callable[[str], None]


@dataclass(eq=False)
class Lease:
    """One caller's use of the ranks. `info`: the record of a completed sampling job; `strategy`: the requested one, or
    None; `images`: how many it is for; `spec`: its model; `file`: the model's file as it was when the job began,
    None until that is known; `idle_s`: seconds that the ranks had been idle before."""

    request: str
    _cancel: threading.Event
    _should_cancel: ShouldCancel | None
    on_phase: OnPhase
    _new_exchange: Callable[[Lease, frozenset[str]], Exchange]
    info: RunInfo | None = None
    strategy: ParallelStrategy | None = None
    images: int = 0
    spec: ModelSpec | None = None
    file: FileIdentity | None = None
    idle_s: float = 0.0
    started: float = field(default_factory=time.monotonic)
    cancelled_at: float | None = None

    @property
    def seconds(self) -> float:
        """The seconds since the lease began."""
        return time.monotonic() - self.started

    def exchange(self, survivable: frozenset[str] = USER_ERRORS) -> Exchange:
        """Returns a new Exchange with all ranks. `survivable`: errors that leave them usable. Raises Cancelled."""
        return self._new_exchange(self, survivable)

    def cancelled(self) -> bool:
        """Returns True if the request is cancelled; notes when that was first seen."""
        if not (self._cancel.is_set() or (self._should_cancel is not None and self._should_cancel())):
            return False
        if self.cancelled_at is None:
            self.cancelled_at = time.monotonic()
        return True

    def wait(self, until: float) -> None:
        """Sleeps until time.monotonic() reaches `until` or the request is cancelled."""
        while time.monotonic() < until and not self.cancelled():
            time.sleep(deadlines.POLL)
