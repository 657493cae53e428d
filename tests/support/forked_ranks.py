"""Ranks for tests, forked from a process that has torch and diffusers loaded: these imports are most of a start.

A ForkedSubprocess replaces the module `subprocess` in a supervisor. A rank that it starts has the command line,
environment, descriptors, session and parent that the supervisor requested. Tests of the start itself have the marker
`real_start`, because a fork skips it. Forks share one hash seed, unlike separate processes.
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
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import BinaryIO

# Variables that a rank reads at run time; all others must be the same as when the server imported its modules.
_NO_CUDA_CONTEXT = "PYTORCH_NVML_BASED_CUDA_CHECK"  # makes torch look for GPUs without a driver call
_READ_AT_RUN_TIME = ("PARALLEL_SAMPLING_", "OMP_NUM_THREADS", "TORCHINDUCTOR_CACHE_DIR", _NO_CUDA_CONTEXT)
_PR_SET_CHILD_SUBREAPER = 36  # <linux/prctl.h>
_LONGEST_COMMAND = 4096  # bytes
_START = 200.0  # s for the imports on a busy machine


@dataclass
class ForkedRank:
    """A forked rank with those fields of subprocess.Popen that the supervisor uses."""

    pid: int
    stdout: BinaryIO
    returncode: int | None = None


@dataclass
class ForkedServer:
    """A server that is a fork of this process, with what a ForkedSubprocess uses of subprocess.Popen."""

    pid: int

    def wait(self, timeout: float = 0) -> int | None:
        with suppress(ChildProcessError):  # something else in this process has collected its exit code
            return os.waitpid(self.pid, 0)[1]


class ForkedSubprocess:
    """Replaces `subprocess` in `supervisor`: ranks are forks of one server, which starts with the first rank.

    This module imports nothing of the pack, because ComfyUI imports the pack under another name.
    """

    PIPE, DEVNULL, STDOUT = subprocess.PIPE, subprocess.DEVNULL, subprocess.STDOUT

    def __init__(self, supervisor: ModuleType) -> None:
        self.enabled = True
        self._root: Path = supervisor.PACK_ROOT
        environment = supervisor.rank_environment(os.environ, self._root, ("cpu:0",))
        # A process with threads cannot be forked safely.
        self._environment = {**environment, "OMP_NUM_THREADS": "1", _NO_CUDA_CONTEXT: "1"}
        self._server: subprocess.Popen | ForkedServer | None = None
        self._control: socket.socket | None = None
        self._owner = 0
        self._lock = threading.Lock()

    @property
    def pid(self) -> int | None:
        """Process id of the server, or None if there is none."""
        return None if self._server is None else self._server.pid

    @property
    def descriptor(self) -> int | None:
        """The only descriptor that this process holds for the server, or None."""
        return None if self._control is None else self._control.fileno()

    def Popen(self, command: Sequence[str], **options) -> ForkedRank | subprocess.Popen:
        """Starts a rank as subprocess.Popen does, but by a fork. Raises RuntimeError if the environment differs."""
        if not self.enabled:
            return subprocess.Popen(command, **options)
        if changed := _at_import(options["env"]) ^ _at_import(self._environment):
            raise RuntimeError(
                f"libraries may read {changed} as they load: such a test needs the mark real_start"
            )
        assert (options["cwd"], options["start_new_session"]) == (self._root, True)
        assert (options["stdout"], options["stderr"]) == (self.PIPE, self.STDOUT)
        self.prepare()
        with self._lock:
            return self._fork(command, options["env"], options["pass_fds"])

    def close(self) -> None:
        """Ends the server. Its ranks keep running."""
        if self._server is not None and self._owner == os.getpid():
            self._control.close()
            self._server.wait(10)
        self._server = self._control = None

    def prepare(self) -> None:
        """Starts the server unless it runs, so that a test with a deadline does not have to wait for it."""
        with self._lock:
            if self._server is None or self._owner != os.getpid():
                self._start()

    def fork_server_here(self) -> None:
        """Makes the server a fork of this process, which has imported the modules of ranks and has one thread."""
        from tests.support import fork_server

        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.settimeout(_START)
        with theirs:
            pid = os.fork()
            if pid == 0:
                self._control.close()
                fork_server.serve(theirs)
                os._exit(0)
        self._server, self._owner = ForkedServer(pid), os.getpid()

    def _start(self) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.settimeout(_START)
        with theirs:
            server = [
                *_interpreter(),
                "-m",
                "tests.support.fork_server",
                str(theirs.fileno()),
                "-" * _LONGEST_COMMAND,
            ]
            self._server = subprocess.Popen(
                server,
                cwd=self._root,
                env=self._environment,
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


def _interpreter() -> list[str]:
    """Returns the command of this interpreter with its flags, which ranks also have."""
    return [sys.executable, "-u", *subprocess._args_from_interpreter_flags()]


def _at_import(environment: Mapping[str, str]) -> set[tuple[str, str]]:
    return {item for item in environment.items() if not item[0].startswith(_READ_AT_RUN_TIME)}


def _adopt_orphans(yes: bool) -> None:
    """Sets or clears: descendants become children of this process when their parents end."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, int(yes), 0, 0, 0)
