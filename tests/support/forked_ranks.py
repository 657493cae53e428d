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
import time
from collections.abc import Mapping, Sequence
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
class ForkedProcess:
    """A forked child with those parts of subprocess.Popen that the supervisor, torchrun and tests use."""

    pid: int
    stdout: BinaryIO | None = None
    returncode: int | None = None

    def poll(self) -> int | None:
        return self._collect(os.WNOHANG)

    def wait(self, timeout: float | None = None) -> int | None:
        if timeout is None:
            return self._collect(0)
        until = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > until:
                raise subprocess.TimeoutExpired(str(self.pid), timeout)
            time.sleep(0.01)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def _collect(self, options: int) -> int | None:
        if self.returncode is None:
            try:
                ended, status = os.waitpid(self.pid, options)
            except ChildProcessError:  # something else has collected the exit code
                self.returncode = 0
            else:
                self.returncode = os.waitstatus_to_exitcode(status) if ended else None
        return self.returncode


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
        self._server: subprocess.Popen | ForkedProcess | None = None
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

    def Popen(self, command: Sequence[str], **options) -> ForkedProcess | subprocess.Popen:
        """Starts a rank as subprocess.Popen does, but by a fork. Raises RuntimeError if the environment differs."""
        if not self.enabled:
            return subprocess.Popen(command, **options)
        if changed := _at_import(options["env"]) ^ _at_import(self._environment):
            raise RuntimeError(
                f"libraries may read {changed} as they load: such a test needs the mark real_start"
            )
        assert (options["cwd"], options["start_new_session"]) == (self._root, True)
        assert (options["stdout"], options["stderr"]) == (self.PIPE, self.STDOUT)
        reader, writer = os.pipe()
        try:
            pid = self.fork(command, options["env"], writer, options["pass_fds"]).pid
            return ForkedProcess(pid, os.fdopen(reader, "rb"))
        finally:
            os.close(writer)

    def fork(
        self, command: Sequence[str], env: Mapping[str, str], stdout: int, pass_fds: Sequence[int] = ()
    ) -> ForkedProcess:
        """Starts `command` (`python … -m MODULE …`) with this environment and these descriptors."""
        self.prepare()
        order = json.dumps({"command": command, "env": env, "pass_fds": pass_fds}).encode()
        with self._lock:
            _adopt_orphans(True)
            try:
                socket.send_fds(self._control, [order], [stdout, *pass_fds])
                return ForkedProcess(int(self._receive()))
            finally:
                _adopt_orphans(False)

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

    def take_over(self, other: ForkedSubprocess) -> None:
        """Makes the server of `other` this object's."""
        self._server, self._control, self._owner = other._server, other._control, other._owner

    def fork_server_here(self) -> None:
        """Makes the server a fork of this process, which has imported the modules of ranks and has one thread."""
        from tests.support import fork_server

        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.settimeout(_START)
        with theirs:
            pid = os.fork()
            if pid == 0:
                self._control.close()
                fork_server.show_as(["python", "-m", "tests.support.fork_server"])
                fork_server.serve(theirs)
                os._exit(0)
        self._server, self._owner = ForkedProcess(pid), os.getpid()

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
