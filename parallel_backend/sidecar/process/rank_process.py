"""One rank's process on this computer: its output, its end, and the clean-up after it."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess

from .exit_status import ExitStatus, count_oom_kills, describe_exit

MAX_OUTPUT = 64 * 1024  # bytes of a rank's output kept for error messages
_READ = 64 * 1024  # bytes read at once, so that one flooding rank does not keep the others waiting

log = logging.getLogger("parallel_backend.ranks")


class RankProcess:
    """One rank as the supervisor sees it. Owned by the supervisor's thread."""

    def __init__(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None  # _popen pipes it
        self.rank = rank
        self.process = process
        self.stdout = process.stdout
        self.pid = process.pid
        self.pidfd = os.pidfd_open(process.pid)
        self.output = bytearray()
        self._oom_kills = count_oom_kills()
        self._line = b""
        os.set_blocking(self.stdout.fileno(), False)

    def drain(self) -> bool:
        """Reads and logs up to _READ bytes of output; returns False at end of file."""
        try:
            data = os.read(self.stdout.fileno(), _READ)
        except BlockingIOError:
            return True
        self.output += data
        del self.output[:-MAX_OUTPUT]
        *lines, self._line = (self._line + data).split(b"\n")
        for line in lines:
            log.info("process %d: %s", self.rank, line.decode(errors="replace"))
        self._line = self._line[-MAX_OUTPUT:]
        return bool(data)

    def signal(self, number: int) -> None:
        """Signals the rank and the processes that it started (it leads its own session). Safe until it is reaped."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)

    def reap(self) -> ExitStatus:
        """Reaps the ended process, closes its descriptors and returns how it ended."""
        self.signal(signal.SIGKILL)  # compile workers and the like
        try:
            code, peak_bytes = self._collect()
            # Do not wait for end of file: a grandchild may keep the pipe open.
            for _ in range(MAX_OUTPUT // _READ + 1):
                if not self.drain():
                    break
            oom_kills = count_oom_kills()
            if oom_kills is not None and self._oom_kills is not None:
                oom_kills -= self._oom_kills
            return describe_exit(code, bytes(self.output), oom_kills=oom_kills, peak_bytes=peak_bytes)
        finally:
            self.stdout.close()
            os.close(self.pidfd)

    def _collect(self) -> tuple[int | None, int]:
        """Returns the exit code and the peak bytes of host memory. The code is None if something else has collected it:
        another thread that waits for any child, or the kernel if SIGCHLD is ignored."""
        try:
            _, status, usage = os.wait4(self.pid, 0)
        except ChildProcessError:
            self.process.returncode = 0  # as subprocess does then
            return None, 0
        self.process.returncode = code = os.waitstatus_to_exitcode(status)
        return code, usage.ru_maxrss * 1024
