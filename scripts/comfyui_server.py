"""A real ComfyUI that runs headless in its own folder and leaves no process behind."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

import psutil

from steps import SetupError

# Seconds. A cold start took 6 s on two cores, and more than 120 on a shared machine.
START_TIMEOUT = 300
# How long ComfyUI may take to end after an interrupt, and then its children (docs/reliability.md promises 2 s).
STOP_TIMEOUT = 30
CHILDREN_TIMEOUT = 2

_LOG_LINES_SHOWN = 30
_TAKEN = "is already in use"  # ComfyUI's message about a port
_PORTS_TRIED = 5
_PR_SET_PDEATHSIG = 1


class ComfyUIServer:
    """One ComfyUI process on 127.0.0.1 and a free port; a context manager that starts and stops it.

    ``base_directory`` gets ComfyUI's models, input, output and custom_nodes folders; ``packs`` maps a folder name under
    custom_nodes to the folder that is linked there. ``survivors`` lists, after :meth:`stop`, the command lines of
    child processes that outlived ComfyUI by more than two seconds (they are killed).
    """

    def __init__(
        self,
        comfyui: Path,
        base_directory: Path,
        packs: Mapping[str, Path],
        *,
        cpu: bool,
        arguments: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.comfyui = comfyui
        self.base_directory = base_directory
        self.log = base_directory / "comfyui.log"
        self.survivors: list[str] = []
        self._packs = dict(packs)
        self._arguments = [*(["--cpu"] if cpu else []), *arguments]
        self._environment = {**os.environ, **(environment or {})}
        self._process: subprocess.Popen[bytes] | None = None
        self._port = 0

    @property
    def url(self) -> str:
        """Address of the HTTP API and the UI."""
        return f"http://127.0.0.1:{self._port}"

    @property
    def is_started(self) -> bool:
        """True if this object has started ComfyUI and has not stopped or killed it since."""
        return self._process is not None

    @property
    def pid(self) -> int:
        """Process id of the running ComfyUI."""
        assert self._process is not None, "ComfyUI is not running"
        return self._process.pid

    @property
    def output_directory(self) -> Path:
        """Folder in which ComfyUI's nodes save their files."""
        return self.base_directory / "output"

    def __enter__(self) -> ComfyUIServer:
        self.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    def start(self) -> None:
        """Starts ComfyUI and waits until it answers.

        Raises:
            SetupError: it ended or did not answer in time; the message shows the end of its log.
        """
        for folder in ("custom_nodes", "models", "input", "output", "temp", "user"):
            (self.base_directory / folder).mkdir(parents=True, exist_ok=True)
        for name, source in self._packs.items():
            link = self.base_directory / "custom_nodes" / name
            if not link.exists():
                link.symlink_to(source.resolve(), target_is_directory=True)
        for attempt in range(1, _PORTS_TRIED + 1):
            try:
                return self._start_on(free_port())
            except SetupError:
                # Another program may have taken the port between our check and ComfyUI's use of it, seconds later.
                if _TAKEN not in self.log_tail() or attempt == _PORTS_TRIED:
                    raise

    def _start_on(self, port: int) -> None:
        self._port = port
        command = [sys.executable, self.comfyui / "main.py", "--base-directory", self.base_directory]
        command += ["--listen", "127.0.0.1", "--port", str(self._port), "--disable-auto-launch"]
        command += ["--disable-api-nodes", "--database-url", "sqlite:///:memory:", *self._arguments]
        with self.log.open("ab") as log:
            self._process = self._launch([*map(str, command)], log)
        try:
            self._wait_until_it_answers()
        except BaseException:
            self.stop()
            raise

    def _launch(self, command: list[str], log: BinaryIO) -> subprocess.Popen[bytes]:
        """Starts the process, which writes to `log` and ends with this one."""
        return subprocess.Popen(
            command,
            cwd=self.comfyui,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl+C reaches us only; we pass it on once
            preexec_fn=_die_with_parent,
        )

    def stop(self) -> None:
        """Interrupts ComfyUI as Ctrl+C does, kills what does not end in time, and fills :attr:`survivors`."""
        self._end(signal.SIGINT)

    def kill(self) -> None:
        """Kills ComfyUI without a warning, as an out-of-memory killer does; then continues as :meth:`stop`."""
        self._end(signal.SIGKILL)

    def _end(self, how: signal.Signals) -> None:
        if self._process is None:
            return
        children = self.children()  # afterwards they have another parent
        self._process.send_signal(how)
        try:
            self._process.wait(STOP_TIMEOUT)
        except subprocess.TimeoutExpired:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()
        self._process = None
        _, alive = psutil.wait_procs(children, CHILDREN_TIMEOUT)
        self.survivors = [line for process in alive if (line := _command_line(process))]
        for process in alive:
            process.kill()

    def children(self) -> list[psutil.Process]:
        """Returns every living process below ComfyUI."""
        try:
            return psutil.Process(self.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []

    def log_tail(self, count: int = _LOG_LINES_SHOWN) -> str:
        """Returns the last lines of ComfyUI's log, for a message."""
        lines = self.log.read_text(errors="replace").splitlines()[-count:]
        return "\n".join(f"   | {line}" for line in lines)

    def _wait_until_it_answers(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT
        while time.monotonic() < deadline:
            if self._process is not None and self._process.poll() is not None:
                code = self._process.returncode
                raise SetupError(f"ComfyUI ended while starting (exit {code}):\n{self.log_tail()}")
            try:
                with urllib.request.urlopen(f"{self.url}/system_stats", timeout=2):
                    return
            except (urllib.error.URLError, OSError):
                time.sleep(0.1)
        raise SetupError(f"ComfyUI did not answer within {START_TIMEOUT} s:\n{self.log_tail()}")


def free_port() -> int:
    """Returns a port of 127.0.0.1 that nobody uses now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None


def _die_with_parent() -> None:
    """Runs in the child: asks Linux to kill it when the thread that started it ends, however that happens."""
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _command_line(process: psutil.Process) -> str:
    """Returns "" for a process that has ended by now, even if the system has not cleared it away."""
    try:
        return " ".join(process.cmdline()) or process.name()
    except psutil.NoSuchProcess:  # or psutil.ZombieProcess
        return ""
    except psutil.Error:
        return f"process {process.pid}"
