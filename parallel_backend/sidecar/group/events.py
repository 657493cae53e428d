"""Events of groups of ranks and of their requests, for listeners: the status panel, metrics, logs.

A listener is called in the thread that emits the event, so it must be quick. Its exceptions are only logged.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass

from ...requests import LoadInfo, ModelSpec, RunInfo
from ...strategy import ParallelStrategy

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Changed:
    """A group's state or phase has changed; Sidecar.status() returns the new one."""

    devices: tuple[str, ...]


@dataclass(frozen=True)
class Started:
    """All ranks of a group are ready. `after`: the failure that ended the previous ranks, "" for none."""

    devices: tuple[str, ...]
    seconds: float
    after: str


@dataclass(frozen=True)
class Loaded:
    """The ranks have loaded a model."""

    devices: tuple[str, ...]
    spec: ModelSpec
    info: LoadInfo


@dataclass(frozen=True)
class Stepped:
    """`step` (1-based) of `steps` of a sampling job under `strategy` took `seconds`."""

    devices: tuple[str, ...]
    step: int
    steps: int
    seconds: float
    strategy: ParallelStrategy


@dataclass(frozen=True)
class RequestFailed:
    """A rank failed; if it died idle, this is emitted at the next request. `cause`: in words; `crashed`: True if its
    process ended or hung, False if its code raised an error; `broken`: True if it failed too often, so that the group
    does not restart by itself; `reason`: one of errors.FAILURES."""

    devices: tuple[str, ...]
    rank: int | None  # None if all failed together
    cause: str
    crashed: bool
    broken: bool
    reason: str

    @property
    def device(self) -> str:
        return ", ".join(self.devices) if self.rank is None else self.devices[self.rank]


@dataclass(frozen=True)
class RequestEnded:
    """A request has ended. `request`: its kind, such as "sample"; `result`: done, cancelled, refused, out_of_memory or
    failed; `cancel_s`: seconds from the detection of a cancel to the end, None without one; `info`: the record of a
    completed sampling job, else None; `strategy`: the requested one, or None; `images`: how many it is for; `spec`: its
    model, or None; `prompt_id`: ComfyUI's, "" for none; `idle_s`: seconds that the ranks had been idle before."""

    devices: tuple[str, ...]
    request: str
    result: str
    seconds: float
    cancel_s: float | None
    info: RunInfo | None
    strategy: ParallelStrategy | None
    images: int
    spec: ModelSpec | None = None
    prompt_id: str = ""
    idle_s: float = 0.0


@dataclass(frozen=True)
class Released:
    """Ranks were ended while no request used them, `idle_s` seconds after the last one."""

    devices: tuple[str, ...]
    idle_s: float


@dataclass(frozen=True)
class Recovering:
    """Ranks failed during a request, and new ones start for it. `words`: which rank failed, and where a job resumes."""

    devices: tuple[str, ...]
    words: str


Event = Changed | Recovering | Started | Loaded | Stepped | RequestFailed | RequestEnded | Released
Listener = Callable[[Event], None]

_listeners: list[Listener] = []
_lock = threading.Lock()


def listen(listener: Listener) -> Callable[[], None]:
    """Calls `listener` with every event from now on; returns a function that ends that."""
    with _lock:
        _listeners.append(listener)

    def stop() -> None:
        with _lock:
            if listener in _listeners:
                _listeners.remove(listener)

    return stop


def emit(event: Event) -> None:
    """Calls every listener."""
    with _lock:
        listeners = tuple(_listeners)
    for listener in listeners:
        try:
            listener(event)
        except Exception:
            log.exception("a listener failed on %s", type(event).__name__)
