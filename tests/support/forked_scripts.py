"""Scripts that act as ComfyUI's process, like those of fault_injection.py, but without an import.

`python -m tests.support.forked_scripts FOLDER` runs as a fork of the fork server, and its ranks are forks of a server
that is a fork of it. Scripts of processes as they start outside tests: fault_injection.py.
"""

from __future__ import annotations

import io
import os
import runpy
import signal
import sys
import textwrap
import threading
from contextlib import closing
from pathlib import Path

_BEFORE, _SCRIPT = "before.py", "script.py"
_PATIENCE = 120.0  # s


class ForkedScript:
    """A running script. `before`: lines that run first, whose effects its ranks inherit."""

    def __init__(self, script: str, folder: Path, before: str = "") -> None:
        from fault_injection import PROLOGUE
        from parallel_backend.sidecar.group import supervisor
        from parallel_backend.sidecar.process.environment import rank_environment

        (folder / _BEFORE).write_text(before)
        (folder / _SCRIPT).write_text(PROLOGUE.format(folder=str(folder)) + textwrap.dedent(script))
        forks = supervisor.subprocess
        self._process = forks.Popen(
            [sys.executable, "-m", "tests.support.forked_scripts", str(folder)],
            cwd=supervisor.PACK_ROOT,
            env=rank_environment(os.environ, supervisor.PACK_ROOT, ("cpu:0",)),
            stdout=forks.PIPE,
            stderr=forks.STDOUT,
            pass_fds=(),
            start_new_session=True,
        )
        self.pid, self.stdout = self._process.pid, io.TextIOWrapper(self._process.stdout)

    def kill(self) -> None:
        self._process.send_signal(signal.SIGKILL)

    def said(self) -> str:
        """Returns what the script printed, once it has ended."""
        timer = threading.Timer(_PATIENCE, self.kill)
        timer.start()
        try:
            return self.stdout.read()
        finally:
            timer.cancel()

    def close(self) -> None:
        """Ends the script. It does not end its ranks."""
        self.kill()
        self._process.wait()
        self.stdout.close()


def run_forked(script: str, folder: Path, before: str = "") -> str:
    """Runs a script and returns what it prints."""
    with closing(ForkedScript(script, folder, before)) as running:
        return running.said()


def _main() -> None:
    support = Path(__file__).parent
    sys.path.insert(0, str(support))
    from forked_ranks import ForkedSubprocess
    from parallel_backend.sidecar.group import supervisor

    folder = Path(sys.argv[1])
    runpy.run_path(str(folder / _BEFORE))
    forks = ForkedSubprocess(supervisor)
    forks.fork_server_here()
    supervisor.subprocess = forks
    try:
        runpy.run_path(str(folder / _SCRIPT))
    finally:
        forks.close()


if __name__ == "__main__":
    _main()
