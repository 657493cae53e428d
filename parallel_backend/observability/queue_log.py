"""The queue log: a file with every prompt that ComfyUI accepted, until it has ended, to send again what a dead ComfyUI
never ran. Off unless VARIABLE names the file.

Lines of JSON, each written and on the disk (fsync) before whoever sent the prompt is answered. A last line that was cut
off was never answered for. One process writes at a time, by a lock on the file.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from ..errors import RequestError

VARIABLE = "PARALLEL_SAMPLING_QUEUE_LOG"  # a file
FILE_BYTES = 64 * 2**20  # then what has ended is left out of it
# Of a prompt's extra_data what a picture needs. All else may be somebody's key, and is left out by name.
_KEPT_EXTRA = ("extra_pnginfo", "preview_method")
_KEPT = ("prompt", "client_id", "partial_execution_targets")
_LOOK_AGAIN = 0.05  # s, while prompts wait

log = logging.getLogger(__name__)


@dataclass
class Entry:
    """An accepted prompt. `request`: what to send again; `number`: its place in the queue; `left_out`: names of what
    was sent with it and is not kept; `sending`: it went to another ComfyUI, in that session, and no answer came."""

    prompt_id: str
    number: float
    request: dict[str, Any]
    left_out: tuple[str, ...] = ()
    sending: str | None = None


def read_open(lines: Iterator[bytes]) -> dict[str, Entry]:
    """Those that have neither ended nor been sent again, by id, in the order in which they would have run."""
    found: dict[str, Entry] = {}
    for line in lines:
        if not line.endswith(b"\n"):
            continue
        try:
            said = json.loads(line)
            if "accepted" in said:
                entry = Entry(said["accepted"], said["number"], said["request"], tuple(said["left_out"]))
                found[entry.prompt_id] = entry
            elif "sending" in said and said["sending"] in found:
                found[said["sending"]].sending = said["session"]
            elif "refused" in said and said["refused"] in found:
                found[said["refused"]].sending = None
            else:
                found.pop(said.get("ended") or said.get("sent"), None)
        except (ValueError, KeyError, TypeError, RecursionError):
            log.warning(
                "parallel sampling: the queue log has a line that makes no sense, which is passed over"
            )
    return dict(sorted(found.items(), key=lambda item: item[1].number))


class QueueLogFile:
    """One file, locked. Raises RequestError where another process has it, OSError where it cannot be used."""

    def __init__(self, path: Path, *, create: bool = True) -> None:
        import fcntl  # not on Windows, where ranks do not run but this module must load

        self.path = path
        flags = os.O_RDWR | os.O_APPEND | os.O_CLOEXEC | (os.O_CREAT if create else 0)
        self._file = os.open(path, flags, 0o600)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.fchmod(self._file, 0o600)  # there are people's prompts in it
        except BlockingIOError:
            os.close(self._file)
            raise RequestError(
                f"{path} belongs to a ComfyUI that is running, or is being sent; each needs one of its own."
            ) from None
        except BaseException:
            os.close(self._file)
            raise

    @property
    def size(self) -> int:
        return os.fstat(self._file).st_size

    def read_open(self) -> dict[str, Entry]:
        with self.path.open("rb") as file:
            return read_open(iter(file))

    def append(self, *lines: Mapping[str, Any]) -> None:
        """On the disk when this returns; whole lines or, where the disk is full, nothing that is read again."""
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

    def close(self) -> None:
        os.close(self._file)


@dataclass
class QueueLog:
    """ComfyUI's side: notes what it accepts, and what is no longer in its queue. `queued()`: ids of the prompts that
    run or wait. Any thread; a disk that fails costs the log and no prompt."""

    path: Path
    queued: Callable[[], Collection[str]]
    file_bytes: int = FILE_BYTES
    _open: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._more = threading.Event()
        self._most = self.file_bytes
        self._file = QueueLogFile(self.path)
        if left := self._file.read_open():
            at = datetime.now(timezone.utc).strftime("%Y%m%dT%H%M%S.%fZ")
            kept = self.path.with_name(f"{self.path.name}.{at}")
            self.path.rename(kept)
            self._file.close()
            self._file = QueueLogFile(self.path)
            log.warning(
                "parallel sampling: %d prompts had not ended when ComfyUI did. Send them again with: "
                "python -m parallel_backend resend %s --to URL",
                *(len(left), kept),
            )
        elif self._file.size:
            self._rewrite({})
        self._closing = threading.Event()
        self._follower = threading.Thread(target=self._follow, name="parallel-queue-log", daemon=True)
        self._follower.start()

    def accept(self, prompt_id: str, number: float, body: Mapping[str, Any]) -> None:
        """A prompt is in the queue, and whoever sent it is answered when this returns."""
        extra = body.get("extra_data")
        extra = extra if isinstance(extra, dict) else {}
        request = {name: body[name] for name in _KEPT if body.get(name) is not None}
        request["extra_data"] = {name: extra[name] for name in _KEPT_EXTRA if name in extra}
        line = {
            "accepted": prompt_id,
            "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "number": number,
            "left_out": sorted(set(extra) - set(_KEPT_EXTRA)),
            "request": request,
        }
        with self._lock:
            self._write(line)
            self._open.add(prompt_id)
        self._more.set()

    def close(self) -> None:
        """Notes nothing more. What is open then stays so."""
        self._closing.set()
        self._more.set()
        self._follower.join()
        self._file.close()

    def _follow(self) -> None:
        while self._more.wait() and not self._closing.is_set():
            with self._lock:
                # Looked up under the lock: what is accepted afterwards is not taken for ended.
                ended = self._open - set(self.queued())
                self._open -= ended
                if ended:
                    self._write(*({"ended": prompt_id} for prompt_id in sorted(ended)))
                if self._file.size > self._most:
                    self._shorten()
                if not (self._open or self._closing.is_set()):
                    self._more.clear()
                    continue
            self._closing.wait(_LOOK_AGAIN)

    def _write(self, *lines: Mapping[str, Any]) -> None:
        try:
            self._file.append(*lines)
        except OSError as error:
            log.warning("parallel sampling: the queue log %s lacks something: %s", self.path, error)

    def _shorten(self) -> None:
        try:
            self._rewrite(self._file.read_open())
        except OSError as error:
            log.warning("parallel sampling: the queue log %s stays long: %s", self.path, error)
        self._most = max(self.file_bytes, 2 * self._file.size)

    def _rewrite(self, entries: Mapping[str, Entry]) -> None:
        """The file anew with these alone; whole or not at all."""
        part = self.path.with_name(f"{self.path.name}.part")
        part.unlink(missing_ok=True)
        new = QueueLogFile(part)
        try:
            for entry in entries.values():
                new.append(
                    {
                        "accepted": entry.prompt_id,
                        "number": entry.number,
                        "left_out": list(entry.left_out),
                        "request": entry.request,
                    }
                )
            part.replace(self.path)
        except BaseException:
            new.close()
            raise
        self._file.close()
        self._file, new.path = new, self.path


def begin(queued: Callable[[], Collection[str]], environ: Mapping[str, str] = os.environ) -> QueueLog | None:
    """The log that VARIABLE asks for; None without one, or, with a warning, where its file cannot be used."""
    target = environ.get(VARIABLE, "").strip()
    if not target or target.lower() == "off":
        return None
    try:
        return QueueLog(Path(target), queued)
    except (OSError, RequestError) as error:
        log.warning("parallel sampling: there is no queue log: %s", error)
        return None
