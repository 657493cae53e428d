"""The folder in which the ranks of one group meet over a small file, and the removal of folders of dead processes.

A killed process cannot remove its folders; the next group of the same user, in any process, removes them.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from pathlib import Path

from ...errors import PlatformError

_PREFIX = "parallel-backend-"
_NAMED = re.compile(_PREFIX + r"([0-9]{1,9})-[a-z0-9_]+")  # the id of its process, and tempfile's letters
_STORE, _PROBE = "store", "probe"  # the only files in such a folder


class RendezvousFolder:
    """A private folder that exists until `remove`. Raises PlatformError if no files can be written.

    It is locked while its process lives: a container that shares the parent folder does not know its process ids.
    """

    def __init__(self) -> None:
        sweep(Path(tempfile.gettempdir()))
        path = lock = None
        try:
            path = tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-")  # mode 0700
            lock = _locked(path)
            probe = Path(path, _PROBE)
            probe.write_bytes(bytes(4096))
            probe.unlink()
        except OSError as error:
            if lock is not None:
                os.close(lock)
            if path is not None:
                shutil.rmtree(path, ignore_errors=True)
            raise PlatformError(
                f"{tempfile.tempdir or 'The temporary folder'} takes no files ({error.strerror}), and processes meet "
                f"over a small file there. Free some space, or start ComfyUI with TMPDIR set to a folder that can be "
                f"written."
            ) from None
        self.path, self._lock = path, lock

    @property
    def store(self) -> str:
        """The path of the file over which the ranks meet."""
        return str(Path(self.path, _STORE))

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def sweep(temp: Path) -> None:
    """Removes this user's folders in `temp` whose processes are gone, if they contain only files of ranks."""
    for folder in temp.glob(f"{_PREFIX}*"):
        named = _NAMED.fullmatch(folder.name)
        if named is not None and not lives(int(named[1])):
            _remove(folder)


def lives(pid: int) -> bool:
    """Returns True if there is a process with this id."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):  # another user's process; too large for a process id
        pass
    return True


def _locked(folder: str | Path) -> int:
    """Locks a folder and returns its descriptor. Raises OSError if another process has it or there is no folder."""
    import fcntl  # not on Windows, where ranks do not run but this module must load

    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _remove(folder: Path) -> None:
    try:
        descriptor = _locked(folder)
    except OSError:  # in use, a link, or gone meanwhile
        return
    try:
        with os.scandir(descriptor) as found:
            entries = [(entry.name, entry.is_file(follow_symlinks=False)) for entry in found]
        ours = os.fstat(descriptor).st_uid == os.getuid()
        if ours and all(name in (_STORE, _PROBE) and is_file for name, is_file in entries):
            for name, _ in entries:
                os.unlink(name, dir_fd=descriptor)
            folder.rmdir()
    except OSError:  # another process sweeps as well
        pass
    finally:
        os.close(descriptor)
