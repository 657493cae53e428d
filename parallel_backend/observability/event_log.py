"""What happens to groups of ranks as lines of JSON, for those who collect logs; off unless VARIABLE says where.

No line has a path, a prompt or the text of somebody else's error in it. Lines are written by a thread of their own, so
that no job waits for a disk; what cannot be written is lost, with one warning.
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
from collections.abc import Callable, Mapping
from datetime import datetime, timezone
from pathlib import PurePath

from ..models.registry import provider_of
from ..sidecar.events import Ended, Event, Loaded, RequestFailed, Started, Stepped, listen

VARIABLE = "PARALLEL_SAMPLING_LOG"  # a file, or `stderr`
FILE_BYTES = 10 * 2**20  # then the next file begins
KEPT_FILES = 3  # beside the one that is written
_WAITING_LINES = 10_000  # for a slow disk; more are lost
_PATIENCE = 2.0  # s at the end for lines that wait; a disk that hangs keeps nobody

log = logging.getLogger(__name__)


def begin_log(
    environ: Mapping[str, str] = os.environ, *, file_bytes: int = FILE_BYTES
) -> Callable[[], None] | None:
    """Writes a line per event from now on, to where VARIABLE says; returns what ends that, None where it is not set."""
    target = environ.get(VARIABLE, "").strip()
    if not target or target.lower() == "off":
        return None
    waiting, handler = _Waiting(queue.Queue(_WAITING_LINES)), _writer(target, file_bytes)
    # A logger of its own, which the console's handlers do not see.
    lines = logging.Logger(__name__ + ".lines", logging.INFO)
    lines.addHandler(waiting)
    ending = threading.Event()

    def write_all() -> None:
        while not (ending.is_set() and waiting.queue.empty()):
            record = waiting.queue.get()
            if record is not None:
                handler.handle(record)
        with contextlib.suppress(OSError):  # a last line that did not fit
            handler.close()

    writer = threading.Thread(target=write_all, name="parallel-log", daemon=True)
    writer.start()
    stop_listening = listen(lambda event: _put(lines, event))

    def end() -> None:
        atexit.unregister(end)
        stop_listening()
        ending.set()
        with contextlib.suppress(queue.Full):  # else it has lines to wake it
            waiting.queue.put_nowait(None)
        writer.join(_PATIENCE)

    atexit.register(end)
    return end


def facts(event: Event) -> dict[str, object] | None:
    """What a line says beside its time; None for Changed, which says nothing that the others do not."""
    known = _facts(event)
    if known is None:
        return None
    return {"event": type(event).__name__.lower(), "devices": list(event.devices), **known}


def _facts(event: Event) -> dict[str, object] | None:
    if isinstance(event, Started):
        return {"seconds": _rounded(event.seconds), "after_failure": bool(event.after)}
    if isinstance(event, Loaded):
        return {
            "model": PurePath(event.spec.path.replace("\\", "/")).name,
            "family": provider_of(event.spec.family).name,
            "dtype": event.info.dtype,
            "seconds": _rounded(event.info.seconds),
            "bytes": event.info.bytes,
        }
    if isinstance(event, Stepped):
        return {
            "step": event.step,
            "steps": event.steps,
            "seconds": _rounded(event.seconds),
            "strategy": event.strategy.describe(),
        }
    if isinstance(event, RequestFailed):
        return {
            "rank": event.rank,
            "device": event.device,
            "reason": event.reason,
            "cause": _cause(event),
            "crashed": event.crashed,
            "broken": event.broken,
        }
    if isinstance(event, Ended):
        info = event.info
        return {
            "request": event.request,
            "result": event.result,
            "seconds": _rounded(event.seconds),
            "cancel_seconds": None if event.cancel_s is None else _rounded(event.cancel_s),
            "strategy": None if event.strategy is None else event.strategy.describe(),
            "images": event.images,
            "engine": None if info is None else info.engine,
            "exact": None if info is None else info.exact,
            "bytes_sent": None if info is None else list(info.bytes_sent),
        }
    return None


def _cause(event: RequestFailed) -> str:
    """In words; of an error that was raised on the rank only its kind, since its text may name files."""
    return event.cause.split(":", 1)[0] if event.reason in ("error", "device") else event.cause


def _rounded(seconds: float) -> float:
    return round(seconds, 6)


def _put(lines: logging.Logger, event: Event) -> None:
    said = facts(event)
    if said is not None:
        at = datetime.now(timezone.utc).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        lines.info(json.dumps({"time": at, **said}, ensure_ascii=False))


class _SaysOnce(logging.Handler):
    """A handler that warns of the first line it loses, where logging would print a traceback for each."""

    _said = False

    def handleError(self, record: logging.LogRecord) -> None:
        if not self._said:
            self._said = True
            log.warning(
                "parallel sampling: the log that %s asks for cannot be written (%s), and lines are lost",
                VARIABLE,
                sys.exc_info()[1],
            )


class _Waiting(_SaysOnce, logging.handlers.QueueHandler):
    """Lines on their way to the thread that writes them."""


class _File(_SaysOnce, logging.handlers.RotatingFileHandler):
    """Opened with the first line; a folder that comes into being later serves from then on."""


class _Stderr(_SaysOnce, logging.StreamHandler):
    """ComfyUI's own."""


def _writer(target: str, file_bytes: int) -> logging.Handler:
    if target.lower() == "stderr":
        return _Stderr()
    return _File(target, maxBytes=file_bytes, backupCount=KEPT_FILES, encoding="utf-8", delay=True)
