"""One lock per GPU, so that two processes never put ranks on the same one unknowingly; the second learns who has it.

The lock is an flock on a small file named by the GPU's UUID, because device numbers depend on which GPUs a process can
see. The GPU's rank inherits the descriptor: the kernel releases the lock when the last process that has it ends, even
by a crash.
"""

from __future__ import annotations

import json
import logging
import os
import re
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path

import torch

from ...devices import machine_of
from ...errors import DeviceError
from ...wire import deadlines
from ...wire.cache_folder import lock_folder

VARIABLE = "PARALLEL_SAMPLING_LOCKS"  # the lock folder, which several containers may share, or `off`
CPU_TOO = "PARALLEL_SAMPLING_LOCK_CPU"  # `on` locks cpu:0 and so on like GPUs, for tests without a GPU
_MOST_BYTES = 1024  # of the note in a lock file on who holds the device
_LOCKS = Path("/proc/locks")  # proc(5): …, MAJOR:MINOR:INODE, the first byte, the last

log = logging.getLogger(__name__)


@dataclass(eq=False)
class DeviceLocks:
    """The locks of a group's devices, held until `release`. `held`: the lock file's descriptor by device name."""

    held: dict[str, int] = field(default_factory=dict)

    def of(self, device: str) -> tuple[int, ...]:
        """Returns the descriptors that the rank on `device` inherits: one, or none if the device is not locked."""
        return (self.held[device],) if device in self.held else ()

    def release(self) -> None:
        """Closes the descriptors. The locks end once the ranks that inherited them are gone as well."""
        while self.held:
            os.close(self.held.popitem()[1])


def lock_devices(devices: Sequence[str], environ: Mapping[str, str] = os.environ) -> DeviceLocks:
    """Locks the GPUs among `devices`, but not the CPU: ranks of any number of processes may share it.

    Raises DeviceError if another process holds one, and says who, since when, and what to do. If no lock file can be
    written, it logs a warning and locks nothing: that should not prevent a run.
    """
    names = {device: name for device in devices if (name := _file_name(device, environ)) is not None}
    locks = DeviceLocks()
    if not names:
        return locks
    try:
        folder = _folder(environ)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for device in sorted(names, key=lambda device: names[device]):
            locks.held[device] = _lock(folder / names[device], device)
    except OSError as error:
        locks.release()
        log.warning(
            "parallel sampling: devices cannot be locked against other processes (%s); %s may name a folder for it",
            error.strerror,
            VARIABLE,
        )
    except BaseException:
        locks.release()
        raise
    return locks


def holder_of(device: str, environ: Mapping[str, str] = os.environ) -> str:
    """Returns in words which other process has locked a GPU; "" if none has, or if that is unknown.

    Reads the kernel's list of locks. Taking the lock for a moment could refuse it to a process that starts just then.
    """
    name = _file_name(device, environ)
    if name is None:
        return ""
    try:
        path = _folder(environ) / name
        inode = path.stat().st_ino
        held = {
            line.split()[-3].rpartition(":")[2]
            for line in _LOCKS.read_text().splitlines()
            if " FLOCK " in line
        }
        if str(inode) not in held:
            return ""
        with path.open("rb") as file:
            note = _read(file.fileno())
    except (OSError, IndexError):
        return ""
    ours = note.get("pid") == os.getpid() and note.get("host") == socket.gethostname()
    return "" if ours else _who(note)


def _folder(environ: Mapping[str, str]) -> Path:
    chosen = environ.get(VARIABLE, "").strip()
    return Path(chosen) if chosen else lock_folder()


def _file_name(device: str, environ: Mapping[str, str]) -> str | None:
    """Returns the name of the device's lock file, None if the device is not locked."""
    kind, _, index = device.partition(":")
    # A machine serves one head only, which tracks its groups.
    if machine_of(device) or environ.get(VARIABLE, "").strip().lower() == "off":
        return None
    if kind == "cpu":
        return f"cpu-{index}.lock" if environ.get(CPU_TOO, "").strip().lower() == "on" else None
    try:
        uuid = str(getattr(torch.cuda.get_device_properties(device), "uuid", index))
    except (RuntimeError, AssertionError):  # no such GPU: its rank will report that
        return None
    return f"gpu-{re.sub(r'[^A-Za-z0-9-]', '-', uuid)}.lock"


def _lock(path: Path, device: str) -> int:
    """Takes the lock and returns its descriptor. Raises DeviceError if another process holds it, or OSError."""
    import fcntl  # not on Windows, where ranks do not run but this module must load

    until = time.monotonic() + 2 * deadlines.TERMINATE
    while True:
        descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(descriptor), path.stat()):  # else the file was deleted meanwhile
                now = datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")
                note = {"pid": os.getpid(), "host": socket.gethostname(), "since": now}
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, json.dumps(note).encode(), 0)
                return descriptor
        except BlockingIOError:
            holder = _read(descriptor)
            if time.monotonic() > until or not _is_leaving(holder):
                os.close(descriptor)
                raise DeviceError(
                    f"{device} is in use by another ComfyUI's processes ({_who(holder)}). Choose other devices here, "
                    f"or stop the processes there (sidebar tab Parallel, Stop)."
                ) from None
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)
        time.sleep(deadlines.POLL)


def _read(descriptor: int) -> dict[str, object]:
    """Returns the holder's note; empty if it has not been written yet."""
    try:
        found = json.loads(os.pread(descriptor, _MOST_BYTES, 0))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _is_leaving(holder: Mapping[str, object]) -> bool:
    """Returns True if the holder's ComfyUI has ended or its process id is ours: then only ending ranks hold it."""
    pid = holder.get("pid")
    if holder.get("host") != socket.gethostname() or not isinstance(pid, int):
        return False
    return pid == os.getpid() or not _lives(pid)


def _lives(pid: int) -> bool:
    """Returns True if there is a process with this id."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):  # another user's process; too large for a process id
        pass
    return True


def _who(holder: Mapping[str, object]) -> str:
    pid, host, since = holder.get("pid"), holder.get("host"), holder.get("since")
    if not (isinstance(pid, int) and isinstance(host, str) and isinstance(since, str)):
        return "a process that has not said its number"
    where = "" if host == socket.gethostname() else f" on {host[:64]}"
    return f"process {pid}{where}, since {since[:32]}"
