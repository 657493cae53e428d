"""Events of rank groups as lines of JSON, for log collectors; off unless VARIABLE names a target.

No line contains a path, a prompt or the text of another program's error. A thread of its own writes the lines, so that
no job waits for a disk. Lines that cannot be written are lost, with one warning.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import logging.handlers
import os
import queue
import sys
import threading
from collections.abc import Callable
from datetime import datetime, timezone

from ...models.registry import provider_of
from ...sidecar.group.events import (
    Event,
    Loaded,
    Released,
    RequestEnded,
    RequestFailed,
    Started,
    Stepped,
    listen,
)
from ..cost import device_seconds, model_name, money

VARIABLE = "PARALLEL_SAMPLING_LOG"  # a file, or `stderr`
FILE_BYTES = 10 * 2**20  # size at which the next file begins
MAX_OLD_FILES = 3  # besides the current file
_WAITING_LINES = 10_000  # buffered for a slow disk; more are lost
_PATIENCE = 2.0  # seconds at exit for buffered lines, so that a hanging disk does not block the exit

log = logging.getLogger(__name__)


def begin_log(price: Callable[[], float]) -> Callable[[], None] | None:
    """Starts writing a line per event to the target in VARIABLE. Returns the function that ends it, or None if VARIABLE
    is not set. `price`: returns the price of a device-hour, 0 for none; called at the end of each request."""
    target = os.environ.get(VARIABLE, "").strip()
    if not target or target.lower() == "off":
        return None
    waiting: queue.Queue[logging.LogRecord | None] = queue.Queue(_WAITING_LINES)
    handler: logging.Handler = _Stderr()
    if target.lower() != "stderr":
        handler = _File(target, maxBytes=FILE_BYTES, backupCount=MAX_OLD_FILES, encoding="utf-8", delay=True)
    ending = threading.Event()

    def write_all() -> None:
        while not (ending.is_set() and waiting.empty()):
            record = waiting.get()
            if record is not None:
                handler.handle(record)
        with contextlib.suppress(OSError):  # the last line could not be flushed
            handler.close()

    def put(event: Event) -> None:
        if line := _line(event, price):
            record = logging.makeLogRecord({"msg": line})
            try:
                waiting.put_nowait(record)
            except queue.Full:
                handler.handleError(record)

    writer = threading.Thread(target=write_all, name="parallel-log", daemon=True)
    writer.start()
    stop_listening = listen(put)

    def end() -> None:
        atexit.unregister(end)
        stop_listening()
        ending.set()
        with contextlib.suppress(queue.Full):  # a full queue wakes the writer anyway
            waiting.put_nowait(None)
        writer.join(_PATIENCE)

    atexit.register(end)
    return end


def _facts(event: Event) -> tuple[str, dict[str, object]]:
    """Returns a line's event name, which other programs read, and its fields; ("", {}) for an event without a line."""
    if isinstance(event, Started):
        return "started", {"seconds": event.seconds, "after_failure": bool(event.after)}
    if isinstance(event, Loaded):
        return "loaded", {
            "model": model_name(event.spec),
            "family": provider_of(event.spec.family).name,
            "dtype": event.info.dtype,
            "seconds": event.info.seconds,
            "bytes": event.info.bytes,
        }
    if isinstance(event, Stepped):
        return "stepped", {
            "step": event.step,
            "steps": event.steps,
            "seconds": event.seconds,
            "strategy": event.strategy.describe(),
        }
    if isinstance(event, RequestFailed):
        return "failed", {
            "rank": event.rank,
            "device": event.device,
            "reason": event.reason,
            "cause": _cause(event),
            "crashed": event.crashed,
            "broken": event.broken,
        }
    if isinstance(event, RequestEnded):
        info = event.info
        return "ended", {
            "request": event.request,
            "result": event.result,
            "seconds": event.seconds,
            "cancel_seconds": event.cancel_s,
            "strategy": None if event.strategy is None else event.strategy.describe(),
            "images": event.images,
            "model": None if event.spec is None else model_name(event.spec),
            "prompt_id": event.prompt_id or None,
            "device_seconds": device_seconds(event),
            "idle_device_seconds": len(event.devices) * event.idle_s,
            "engine": None if info is None else info.engine,
            "exact": None if info is None else info.exact,
            "bytes_sent": None if info is None else list(info.bytes_sent),
        }
    if isinstance(event, Released):
        return "released", {"idle_device_seconds": len(event.devices) * event.idle_s}
    return "", {}


def _cause(event: RequestFailed) -> str:
    """Returns the cause in words; for an error raised on a rank only its type, since its text may name files."""
    return event.cause.split(":", 1)[0] if event.reason in ("error", "device") else event.cause


def _line(event: Event, price: Callable[[], float]) -> str:
    """Returns the line of an event as JSON, "" if it has none."""
    word, known = _facts(event)
    if not word:
        return ""
    if isinstance(event, RequestEnded) and (per_hour := price()):
        known["cost"] = money(device_seconds(event), per_hour)
    known = {name: round(value, 6) if isinstance(value, float) else value for name, value in known.items()}
    at = datetime.now(timezone.utc).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    return json.dumps(
        {"time": at, "event": word, "devices": list(event.devices), **known}, ensure_ascii=False
    )


class _WarnsOnce(logging.Handler):
    """A handler that warns of the first lost line only; logging would print a traceback for each."""

    _warned = False

    def handleError(self, record: logging.LogRecord) -> None:
        if not self._warned:
            self._warned = True
            log.warning(
                "parallel sampling: the log that %s asks for cannot be written (%s), and lines are lost",
                VARIABLE,
                sys.exc_info()[1],
            )


class _File(_WarnsOnce, logging.handlers.RotatingFileHandler):
    """A rotating file that is opened with the first line, so a folder created later is found."""


class _Stderr(_WarnsOnce, logging.StreamHandler):  # type: ignore[type-arg]  # takes none before Python 3.11
    """ComfyUI's own stderr."""
