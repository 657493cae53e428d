"""Events in the life of groups of ranks and of their requests, for whoever listens: the status panel, metrics, logs.

Listeners are called in the thread where it happened, so they must be quick; what one raises is logged and harms nobody.
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
    """A group's state or phase is another one now; Sidecar.status() has it."""

    devices: tuple[str, ...]


@dataclass(frozen=True)
class Started:
    """All ranks of a group are ready. `after`: the failure that ended the ranks before them, "" for none."""

    devices: tuple[str, ...]
    seconds: float
    after: str


@dataclass(frozen=True)
class Loaded:
    """Ranks hold another model."""

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
    """A rank failed; one that died idle is noticed with the next request. `cause`: in words; `crashed`: its process
    ended or hung, not an error that its code raised; `broken`: that was too often, the group does not start again by
    itself; `reason`: of errors.FAILURES."""

    devices: tuple[str, ...]
    rank: int | None  # None where all failed together
    cause: str
    crashed: bool
    broken: bool
    reason: str

    @property
    def device(self) -> str:
        return ", ".join(self.devices) if self.rank is None else self.devices[self.rank]


@dataclass(frozen=True)
class RequestEnded:
    """A request is over. `request`: what a caller asked for, such as "sample"; `result`: done, cancelled, refused,
    out_of_memory or failed; `cancel_s`: from the first sight of a cancel to the end, None without one; `info`: how it
    ran, None where nothing did; `strategy`: as asked for, None for requests without one; `images`: that it was for;
    `spec`: the model, None for none; `prompt_id`: ComfyUI's, "" for none; `idle_s`: that ranks had waited for it."""

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
    """Ranks were ended while no request had them, after `idle_s` without one."""

    devices: tuple[str, ...]
    idle_s: float


@dataclass(frozen=True)
class Recovering:
    """Ranks failed during a job, and new ones start for it now. `words`: who failed, and where the job goes on."""

    devices: tuple[str, ...]
    words: str


Event = Changed | Recovering | Started | Loaded | Stepped | RequestFailed | RequestEnded | Released
Listener = Callable[[Event], None]

_listeners: list[Listener] = []
_lock = threading.Lock()


def listen(listener: Listener) -> Callable[[], None]:
    """Has `listener` called with every event from now on; returns what ends that."""
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
