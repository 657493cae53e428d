"""Ranks for tests, forked from a process that has torch and diffusers loaded: to import them costs most of a start.

`FORKED` stands for the module `subprocess` in the supervisor (conftest.py puts it there). A rank that it starts has the
command line, environment, descriptors, session and parent that the supervisor asked for. What a fork cannot show keeps
the real start: tests with the marker `real_start`, and ranks with an environment that libraries read as they load.
"""

from __future__ import annotations

import ctypes
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import BinaryIO

from fork_server import NO_CUDA_CONTEXT
from parallel_backend.options import COMPILE_BACKEND
from parallel_backend.sidecar.environment import rank_environment
from parallel_backend.sidecar.supervisor import PACK_ROOT
from parallel_backend.wire.fault_injection import VARIABLE as FAULT

_READ_AT_RUN_TIME = {COMPILE_BACKEND, FAULT, "OMP_NUM_THREADS"}
_PR_SET_CHILD_SUBREAPER = 36  # <linux/prctl.h>
_LONGEST_COMMAND = 4096  # bytes
_START = 120.0  # s for the imports, on a busy machine


@dataclass
class ForkedRank:
    """What the supervisor uses of a subprocess.Popen."""

    pid: int
    stdout: BinaryIO
    returncode: int | None = None


class ForkedSubprocess:
    """`subprocess` for the supervisor: its ranks are forks of one server, which starts with the first of them."""

    PIPE, DEVNULL, STDOUT = subprocess.PIPE, subprocess.DEVNULL, subprocess.STDOUT

    def __init__(self) -> None:
        self.enabled = True
        self._environment = _environment()
        self._server: subprocess.Popen | None = None
        self._control: socket.socket | None = None
        self._owner = 0
        self._lock = threading.Lock()

    @property
    def pid(self) -> int | None:
        """Process id of the server."""
        return None if self._server is None else self._server.pid

    @property
    def descriptor(self) -> int | None:
        """This process's only descriptor of the server."""
        return None if self._control is None else self._control.fileno()

    def Popen(self, command: Sequence[str], **options) -> ForkedRank | subprocess.Popen:
        """As subprocess.Popen; by a fork where that makes no difference to the rank."""
        if not self.enabled or _at_import(options["env"]) != _at_import(self._environment):
            return subprocess.Popen(command, **options)
        assert (options["cwd"], options["start_new_session"]) == (PACK_ROOT, True)
        assert (options["stdout"], options["stderr"]) == (self.PIPE, self.STDOUT)
        self.prepare()
        with self._lock:
            return self._fork(command, options["env"], options["pass_fds"])

    def close(self) -> None:
        """Ends the server; ranks go on."""
        if self._server is not None and self._owner == os.getpid():
            self._control.close()
            self._server.wait(10)
        self._server = self._control = None

    def prepare(self) -> None:
        """Starts the server unless it runs. A test with a deadline does not want to wait for that."""
        with self._lock:
            if self._server is None or self._owner != os.getpid():
                self._start()

    def _start(self) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.settimeout(_START)
        with theirs:
            self._server = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "tests.support.fork_server",
                    str(theirs.fileno()),
                    "-" * _LONGEST_COMMAND,
                ],
                cwd=PACK_ROOT,
                env=self._environment | {NO_CUDA_CONTEXT: "1"},
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        self._owner = os.getpid()
        self._receive()

    def _fork(self, command: Sequence[str], env: Mapping[str, str], pass_fds: Sequence[int]) -> ForkedRank:
        order = json.dumps({"command": command, "env": env, "pass_fds": pass_fds}).encode()
        reader, writer = os.pipe()
        _adopt_orphans(True)
        try:
            socket.send_fds(self._control, [order], [writer, *pass_fds])
            return ForkedRank(int(self._receive()), os.fdopen(reader, "rb"))
        finally:
            _adopt_orphans(False)
            os.close(writer)

    def _receive(self) -> bytes:
        answer = self._control.recv(64)
        if not answer:
            raise RuntimeError(f"the fork server ended with code {self._server.wait()}; its output says why")
        return answer


def _environment() -> dict[str, str]:
    """The server's: that of a rank, with one thread, because a process with more cannot be forked safely."""
    environment = rank_environment(os.environ, PACK_ROOT, ("cpu:0",))
    environment.pop(FAULT, None)
    return environment | {"OMP_NUM_THREADS": "1"}


def _at_import(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name not in _READ_AT_RUN_TIME}


def _adopt_orphans(yes: bool) -> None:
    """Whether processes below this one become its children when their parents end."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, int(yes), 0, 0, 0)


FORKED = ForkedSubprocess()
