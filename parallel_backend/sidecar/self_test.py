"""Runs self-tests of ComfyUI's module classes in a separate process on the CPU (rank/checks/self_test.py)."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import IO

from ..errors import Cancelled, RankFailed, TransportError
from ..wire import deadlines
from ..wire.checks.findings import SelfTest
from ..wire.strict_json import from_json, parse
from .group.lease import ShouldCancel
from .group.supervisor import PACK_ROOT, require_linux
from .process.environment import interpreter_flags, rank_environment
from .process.exit_status import describe_exit
from .process.rank_process import MAX_OUTPUT

MODULE = "parallel_backend.rank.checks.self_test"
_RANKS = ("cpu:0", "cpu:1")


def run_self_tests(
    root: str,
    class_names: Sequence[str],
    *,
    should_cancel: ShouldCancel | None = None,
    module: str = MODULE,
) -> tuple[SelfTest, ...]:
    """Returns the outcome for each of these classes in the ComfyUI in folder `root`. Blocks.

    Raises Cancelled, or RankFailed if the process crashed, took too long or gave no outcome: that proves nothing about
    the classes. The process ends if this thread does.
    """
    require_linux()
    limit = deadlines.START + deadlines.SELF_TEST * len(class_names)
    with tempfile.TemporaryFile() as answers, tempfile.TemporaryFile() as output:
        with _process(root, class_names, module, answers, output) as process:
            _wait(process, limit, should_cancel)
        found = _outcomes(_end_of(answers))
        if [one.class_name for one in found] == list(class_names):
            return found
        status = describe_exit(process.returncode, _end_of(output), oom_kills=None, peak_bytes=0)
    raise RankFailed(0, f"the self-test {status.words}", crashed=True, reason=status.reason)


@contextlib.contextmanager
def _process(
    root: str, class_names: Sequence[str], module: str, answers: IO[bytes], output: IO[bytes]
) -> Iterator[subprocess.Popen[bytes]]:
    """Starts the process; at the end, kills it and what it forked."""
    command = [sys.executable, "-u", *interpreter_flags(), "-m", module, "--root", root]
    process = subprocess.Popen(
        [*command, "--parent", str(os.getpid()), "--class", *class_names],
        cwd=PACK_ROOT,  # `-m` looks there first, whatever the folder is called
        env=rank_environment(os.environ, PACK_ROOT, _RANKS),
        stdin=subprocess.DEVNULL,
        stdout=answers,
        stderr=output,
        start_new_session=True,  # Ctrl-C in ComfyUI's terminal is ComfyUI's to handle
    )
    try:
        yield process
    finally:
        if process.returncode is None:  # once it has ended, its ranks are gone too
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(deadlines.REAP)


def _wait(process: subprocess.Popen[bytes], limit: float, should_cancel: ShouldCancel | None) -> None:
    deadline = time.monotonic() + limit
    while process.poll() is None:
        if should_cancel is not None and should_cancel():
            raise Cancelled("the self-test was cancelled")
        if time.monotonic() > deadline:
            raise RankFailed(
                0, f"the self-test did not end within {limit:.0f} s", crashed=True, reason="hang"
            )
        time.sleep(deadlines.POLL)


def _outcomes(lines: bytes) -> tuple[SelfTest, ...]:
    """Returns the outcomes; an empty tuple if the output is anything else."""
    try:
        return tuple(
            from_json(parse(line), SelfTest, "the self-test") for line in lines.decode().splitlines()
        )
    except (ValueError, TransportError):
        return ()


def _end_of(file: IO[bytes]) -> bytes:
    file.seek(max(0, os.fstat(file.fileno()).st_size - MAX_OUTPUT))
    return file.read()
