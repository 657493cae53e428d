"""The queue log: a folder with a file for each prompt that ComfyUI accepted and that has not ended, so that prompts
which a crashed ComfyUI never ran can be sent again. Off unless VARIABLE names the folder.

Each file is on the disk (fsync) before the sender of the prompt gets an answer. A lock lets one process write it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import threading
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

from ...errors import RequestError, TransportError
from ...wire.strict_json import from_json

VARIABLE = "PARALLEL_SAMPLING_QUEUE_LOG"  # a folder
# The parts of a prompt's extra_data that a picture needs. Others may be secret keys: only their names are stored.
_STORED_EXTRA = ("extra_pnginfo", "preview_method")
_STORED = ("prompt", "client_id", "partial_execution_targets")
_LOCK = "lock"
_LOOK_AGAIN = 0.05  # seconds between checks while prompts wait

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Entry:
    """An accepted prompt. `request`: the body to send again; `number`: its place in the queue; `left_out`: names of the
    fields that are not stored; `sending`: the session in which it was sent to another ComfyUI without an answer."""

    prompt_id: str
    number: float
    request: dict  # type: ignore[type-arg]  # strict_json takes plain types
    left_out: tuple[str, ...] = ()
    sending: str | None = None


class QueueLogFolder:
    """A locked queue log. Raises RequestError if another process has it, OSError if it cannot be used."""

    def __init__(self, path: Path, *, create: bool = True) -> None:
        import fcntl  # missing on Windows, where ranks do not run but this module must load

        self.path = path
        if create:
            path.mkdir(mode=0o700, exist_ok=True)  # it contains people's prompts
        self._lock = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._lock)
            if not isinstance(error, BlockingIOError):
                raise
            owner = "a ComfyUI that is running, or is being sent"
            raise RequestError(f"{path} belongs to {owner}; each needs one of its own.") from None

    def read_open(self) -> dict[str, Entry]:
        """Returns the prompts by id, in queue order."""
        found = []
        for file in self.path.glob("*.json"):
            try:
                found.append(from_json(json.loads(file.read_bytes()), Entry, "a prompt"))
            except (ValueError, TransportError, RecursionError):
                log.warning("parallel sampling: %s makes no sense, and is left out", file)
        return {entry.prompt_id: entry for entry in sorted(found, key=lambda entry: entry.number)}

    def write(self, entry: Entry) -> None:
        """Stores a prompt, or replaces it. Returns once it is on the disk; after an error nothing has changed."""
        part = self.path / "part"
        with part.open("w") as file:
            os.fchmod(file.fileno(), 0o600)
            file.write(json.dumps(vars(entry)))
            file.flush()
            os.fsync(file.fileno())
        part.replace(self._file_of(entry.prompt_id))
        self._sync()

    def remove(self, prompt_ids: Collection[str]) -> None:
        """Removes prompts that have ended or were sent again."""
        for prompt_id in prompt_ids:
            self._file_of(prompt_id).unlink(missing_ok=True)
        self._sync()

    def close(self) -> None:
        os.close(self._lock)

    def _file_of(self, prompt_id: str) -> Path:
        """Returns the file of a prompt, whose id may be any text: its sender can choose it."""
        return self.path / f"{hashlib.sha256(prompt_id.encode(errors='surrogatepass')).hexdigest()}.json"

    def _sync(self) -> None:
        folder = os.open(self.path, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


class QueueLog:
    """Records which prompts ComfyUI accepts and which have left its queue. Thread-safe; a disk error costs what the log
    has, not prompts. `queued`: returns the ids of the prompts that run or wait."""

    def __init__(self, path: Path, queued: Callable[[], Collection[str]]) -> None:
        self.path, self._queued = path, queued
        self._open: set[str] = set()
        self._changed = threading.Condition()
        self._is_closed = False
        self._folder = QueueLogFolder(path)
        if left := self._folder.read_open():
            at = datetime.now(timezone.utc).strftime("%Y%m%dT%H%M%S.%fZ")
            old = path / at
            old.mkdir(mode=0o700)
            for file in path.glob("*.json"):
                file.rename(old / file.name)
            again = f"Send them again with: python -m parallel_backend resend {old} --to URL"
            log.warning("parallel sampling: %d prompts had not ended when ComfyUI did. %s", len(left), again)
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
            self._change(partial(self._folder.write, entry))
            self._open.add(prompt_id)
            self._changed.notify()

    def close(self) -> None:
        """Stops recording: prompts that are open now stay in the log."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        self._follower.join()
        self._folder.close()

    def _follow(self) -> None:
        with self._changed:
            while not self._is_closed:
                # Checked under the lock, so that a prompt accepted meanwhile is not taken for ended.
                if self._open and (ended := self._open - set(self._queued())):
                    self._open -= ended
                    self._change(partial(self._folder.remove, ended))
                self._changed.wait(_LOOK_AGAIN if self._open else None)

    def _change(self, change: Callable[[], None]) -> None:
        try:
            change()
        except OSError as error:
            log.warning("parallel sampling: the queue log %s lacks something: %s", self.path, error)


def begin(queued: Callable[[], Collection[str]]) -> QueueLog | None:
    """Starts the log that VARIABLE names. Returns None without it, or with a warning if it cannot be used."""
    target = os.environ.get(VARIABLE, "").strip()
    if not target or target.lower() == "off":
        return None
    try:
        return QueueLog(Path(target), queued)
    except (OSError, RequestError) as error:
        log.warning("parallel sampling: there is no queue log: %s", error)
        return None
