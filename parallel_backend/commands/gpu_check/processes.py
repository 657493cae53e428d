"""Processes that run checks for the doctor: a check that crashes or hangs only raises an error in the doctor."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from typing import IO

from ...errors import RankFailed, TransportError
from ...sidecar.group.supervisor import PACK_ROOT
from ...sidecar.process.environment import interpreter_flags
from ...sidecar.process.exit_status import describe_exit, written_stack
from ...sidecar.process.rank_process import MAX_OUTPUT
from ...wire import deadlines
from ...wire.checks.findings import Finding
from ...wire.checks.gpu_check import SHOW_STACK, Answer, CheckSubject
from ...wire.strict_json import from_json, parse, to_json

_READ = 64 * 1024  # bytes per read
_FAREWELL = 15.0  # s for a process to end its ranks by itself after its stdin is closed
_POLL = 0.02  # s
_LINES = 12  # last lines of output shown of a process that hangs without a stack
_AFTER_AN_ERROR = 10.0  # s for the other processes to answer, which may be waiting for the one that raised it

_WAITED = Answer(
    (Finding("error", "skipped", "it gave no answer after the error in the other process"),), raised=True
)


class CheckProcesses:
    """`ranks` processes of the program `module`, which run each check together, until `close`.

    They end when the thread that started them ends, and their own child processes end with them.
    """

    def __init__(self, module: str, subject: CheckSubject, ranks: int, environ: Mapping[str, str]) -> None:
        self.module, self.ranks = module, ranks
        self._store = os.memfd_create("parallel-backend-store", os.MFD_CLOEXEC)  # over which they meet
        self._outputs: list[IO[bytes]] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        self._unread = [b""] * ranks
        for rank in range(ranks):
            self._start(rank, environ)
        self._tell(json.dumps(to_json(subject)))

    def ask(self, check: str, limit_s: float) -> tuple[Answer, ...]:
        """Returns the answer of each process. If one raised an error, the others get some more seconds: they may wait
        for it. Raises RankFailed if a process ends, or if not all answer within `limit_s` seconds."""
        self._tell(check)
        answers: dict[int, Answer] = {}
        deadline = time.monotonic() + limit_s
        with selectors.DefaultSelector() as selector:
            for rank, process in enumerate(self._processes):
                assert process.stdout is not None
                selector.register(process.stdout, selectors.EVENT_READ, rank)
            while len(answers) < self.ranks:
                ready = selector.select(max(0.0, deadline - time.monotonic()))
                silent = set(range(self.ranks)) - set(answers)
                if not ready and any(answer.raised for answer in answers.values()):
                    answers |= dict.fromkeys(silent, _WAITED)
                elif not ready:
                    raise self._hung(min(silent), limit_s)
                for key, _ in ready:
                    read = os.read(key.fd, _READ)
                    if not read:
                        raise self._ended(key.data)
                    self._unread[key.data] += read
                    line, found, rest = self._unread[key.data].partition(b"\n")
                    if found:
                        self._unread[key.data] = rest
                        answers[key.data] = answer = self._read(key.data, line)
                        if answer.raised:
                            deadline = min(deadline, time.monotonic() + _AFTER_AN_ERROR)
        return tuple(answers[rank] for rank in range(self.ranks))

    def close(self) -> None:
        """Ends all processes and their children; kills those that do not end in time."""
        for process in self._processes:
            assert process.stdin is not None
            with contextlib.suppress(OSError):
                process.stdin.close()
        deadline = time.monotonic() + _FAREWELL
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
        self.kill()

    def kill(self) -> None:
        """Kills all processes and their children at once."""
        for process in self._processes:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
            process.wait(deadlines.REAP)
            for stream in (process.stdin, process.stdout):
                assert stream is not None
                with contextlib.suppress(OSError):
                    stream.close()
        for output in self._outputs:
            output.close()
        os.close(self._store)

    def _start(self, rank: int, environ: Mapping[str, str]) -> None:
        arguments = ["--parent", str(os.getpid()), "--rank", str(rank)]
        arguments += ["--rendezvous", f"/proc/self/fd/{self._store}"]
        output = tempfile.TemporaryFile()  # noqa: SIM115, closed with the process
        self._outputs.append(output)
        self._processes.append(
            subprocess.Popen(
                [sys.executable, "-u", *interpreter_flags(), "-m", self.module, *arguments],
                cwd=PACK_ROOT,
                env=environ,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                pass_fds=(self._store,),
                start_new_session=True,
            )
        )

    def _tell(self, line: str) -> None:
        for process in self._processes:
            assert process.stdin is not None
            with contextlib.suppress(OSError):  # the process has ended: reading its answer raises the error
                process.stdin.write(line.encode() + b"\n")
                process.stdin.flush()

    def _read(self, rank: int, line: bytes) -> Answer:
        try:
            return from_json(parse(line.decode()), Answer, "an answer")
        except (ValueError, TransportError) as error:
            raise RankFailed(rank, f"it gave no answer: {error}", crashed=True) from None

    def _ended(self, rank: int) -> RankFailed:
        process = self._processes[rank]
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(deadlines.REAP)
        status = describe_exit(process.returncode, self._output(rank), oom_kills=None, peak_bytes=0)
        return RankFailed(rank, f"its process {status.words}", crashed=True, reason=status.reason)

    def _hung(self, rank: int, limit_s: float) -> RankFailed:
        """Returns the error for a process that hangs, with its stack if it can still print it."""
        with contextlib.suppress(ProcessLookupError):
            self._processes[rank].send_signal(SHOW_STACK)
        frames: list[str] = []
        until = time.monotonic() + deadlines.STACK
        while not frames and time.monotonic() < until:
            time.sleep(_POLL)
            frames = written_stack(self._output(rank))
        lines = frames or self._output(rank).decode(errors="replace").splitlines()[-_LINES:]
        cause = "\n".join([f"it did not end within {limit_s:.0f} s", *lines])
        return RankFailed(rank, cause, crashed=True, reason="hang")

    def _output(self, rank: int) -> bytes:
        file = self._outputs[rank]
        return os.pread(file.fileno(), MAX_OUTPUT, max(0, os.fstat(file.fileno()).st_size - MAX_OUTPUT))
