"""The queue log: a file of every prompt that ComfyUI accepted and that has not ended, so that prompts which a crashed
ComfyUI never ran can be sent again. Off unless VARIABLE names the file.

It has lines of JSON. Each is on the disk (fsync) before the sender of the prompt gets an answer, so a last line that
was cut off was never confirmed. A lock on the file lets one process write at a time.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from ...errors import RequestError

VARIABLE = "PARALLEL_SAMPLING_QUEUE_LOG"  # a file
FILE_BYTES = 64 * 2**20  # size at which ended prompts are removed from it
# The parts of a prompt's extra_data that a picture needs. Others may be secret keys: only their names are stored.
_STORED_EXTRA = ("extra_pnginfo", "preview_method")
_STORED = ("prompt", "client_id", "partial_execution_targets")
_LOOK_AGAIN = 0.05  # seconds between checks while prompts wait

log = logging.getLogger(__name__)


@dataclass
class Entry:
    """An accepted prompt. `request`: the body to send again; `number`: its place in the queue; `left_out`: names of the
    fields that are not stored; `sending`: the session in which it was sent to another ComfyUI without an answer."""

    prompt_id: str
    number: float
    request: dict[str, Any]
    left_out: tuple[str, ...] = ()
    sending: str | None = None

    @property
    def line(self) -> dict[str, Any]:
        """The log line that records the prompt."""
        facts = {"number": self.number, "left_out": list(self.left_out), "request": self.request}
        return {"accepted": self.prompt_id, **facts}


def read_open(lines: Iterator[bytes]) -> dict[str, Entry]:
    """Returns the prompts that have neither ended nor been sent again, by id, in queue order."""
    found: dict[str, Entry] = {}
    for line in lines:
        if not line.endswith(b"\n"):
            continue
        try:
            record = json.loads(line)
            if "accepted" in record:
                entry = Entry(
                    record["accepted"], record["number"], record["request"], tuple(record["left_out"])
                )
                found[entry.prompt_id] = entry
            elif "sending" in record and record["sending"] in found:
                found[record["sending"]].sending = record["session"]
            elif "refused" in record and record["refused"] in found:
                found[record["refused"]].sending = None
            else:
                found.pop(record.get("ended") or record.get("sent"), None)
        except (ValueError, KeyError, TypeError, RecursionError):
            log.warning("parallel sampling: the queue log has a line that makes no sense, which is left out")
    return dict(sorted(found.items(), key=lambda item: item[1].number))


class QueueLogFile:
    """A locked queue log file. Raises RequestError if another process has it, OSError if it cannot be used."""

    def __init__(self, path: Path, *, create: bool = True) -> None:
        import fcntl  # missing on Windows, where ranks do not run but this module must load

        self.path = path
        flags = os.O_RDWR | os.O_APPEND | os.O_CLOEXEC | (os.O_CREAT if create else 0)
        self._file = os.open(path, flags, 0o600)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.fchmod(self._file, 0o600)  # it contains people's prompts
        except OSError as error:
            os.close(self._file)
            if not isinstance(error, BlockingIOError):
                raise
            owner = "a ComfyUI that is running, or is being sent"
            raise RequestError(f"{path} belongs to {owner}; each needs one of its own.") from None

    @property
    def size(self) -> int:
        return os.fstat(self._file).st_size

    def read_open(self) -> dict[str, Entry]:
        with self.path.open("rb") as file:
            return read_open(iter(file))

    def append(self, *lines: Mapping[str, Any]) -> None:
        """Appends lines and returns once they are on the disk. If the disk is full, none of them stays in the file."""
        data = b"".join(json.dumps(line, separators=(",", ":")).encode() + b"\n" for line in lines)
        before = self.size
        try:
            written = os.write(self._file, data)
            if written < len(data):
                raise OSError(f"only {written} of {len(data)} bytes could be written")
            os.fsync(self._file)
        except OSError:
            os.ftruncate(self._file, before)
            raise

    def replaced_by(self, *lines: Mapping[str, Any]) -> QueueLogFile:
        """Replaces this file by one with these lines and returns the new one; the caller closes this one."""
        part = self.path.with_name(f"{self.path.name}.part")
        part.unlink(missing_ok=True)
        new = QueueLogFile(part)
        try:
            new.append(*lines)
            new.path = part.replace(self.path)
        except BaseException:
            new.close()
            raise
        return new

    def close(self) -> None:
        os.close(self._file)


class QueueLog:
    """Records which prompts ComfyUI accepts and which have left its queue. Thread-safe; a disk error costs log lines,
    not prompts. `queued`: returns the ids of the prompts that run or wait."""

    def __init__(self, path: Path, queued: Callable[[], Collection[str]]) -> None:
        self.path, self._queued = path, queued
        self._most = FILE_BYTES
        self._open: dict[str, Entry] = {}
        self._changed = threading.Condition()
        self._is_closed = False
        self._file = QueueLogFile(path)
        if left := self._file.read_open():
            at = datetime.now(timezone.utc).strftime("%Y%m%dT%H%M%S.%fZ")
            old = path.rename(path.with_name(f"{path.name}.{at}"))
            self._file.close()
            self._file = QueueLogFile(path)
            again = f"Send them again with: python -m parallel_backend resend {old} --to URL"
            log.warning("parallel sampling: %d prompts had not ended when ComfyUI did. %s", len(left), again)
        elif self._file.size:
            self._shorten()
        self._follower = threading.Thread(target=self._follow, name="parallel-queue-log", daemon=True)
        self._follower.start()

    def accept(self, prompt_id: str, number: float, body: Mapping[str, Any]) -> None:
        """Records a queued prompt; its sender is answered after this returns."""
        extra = body.get("extra_data")
        extra = extra if isinstance(extra, dict) else {}
        request = {name: body[name] for name in _STORED if body.get(name) is not None}
        request["extra_data"] = {name: extra[name] for name in _STORED_EXTRA if name in extra}
        entry = Entry(prompt_id, number, request, tuple(sorted(set(extra) - set(_STORED_EXTRA))))
        with self._changed:
            self._write({**entry.line, "time": datetime.now(timezone.utc).isoformat(timespec="seconds")})
            self._open[prompt_id] = entry
            self._changed.notify()

    def close(self) -> None:
        """Stops recording: prompts that are open now stay open in the file."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        self._follower.join()
        self._file.close()

    def _follow(self) -> None:
        with self._changed:
            while not self._is_closed:
                # Checked under the lock, so that a prompt accepted meanwhile is not taken for ended.
                ended = sorted(self._open.keys() - set(self._queued())) if self._open else []
                for prompt_id in ended:
                    del self._open[prompt_id]
                if ended:
                    self._write(*({"ended": prompt_id} for prompt_id in ended))
                if self._file.size > self._most:
                    self._shorten()
                self._changed.wait(_LOOK_AGAIN if self._open else None)

    def _write(self, *lines: Mapping[str, Any]) -> None:
        try:
            self._file.append(*lines)
        except OSError as error:
            log.warning("parallel sampling: the queue log %s lacks something: %s", self.path, error)

    def _shorten(self) -> None:
        """Replaces the file by one with only the open prompts; keeps the old one if that fails."""
        try:
            new = self._file.replaced_by(*(entry.line for entry in self._open.values()))
            self._file.close()
            self._file = new
        except OSError as error:
            log.warning("parallel sampling: the queue log %s stays long: %s", self.path, error)
        self._most = max(FILE_BYTES, 2 * self._file.size)


def begin(queued: Callable[[], Collection[str]]) -> QueueLog | None:
    """Starts the log that VARIABLE names. Returns None without it, or with a warning if the file cannot be used."""
    target = os.environ.get(VARIABLE, "").strip()
    if not target or target.lower() == "off":
        return None
    try:
        return QueueLog(Path(target), queued)
    except (OSError, RequestError) as error:
        log.warning("parallel sampling: there is no queue log: %s", error)
        return None
