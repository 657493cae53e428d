"""A doctor that another process started ends when that process ends, and so do its ranks."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest

from scripted import is_running
from waiting import wait_until

ROOT = Path(__file__).resolve().parents[3]
START = textwrap.dedent(
    """
    import os, subprocess, sys
    doctor = [sys.executable, "-m", "parallel_backend", "doctor", "--parent", str(os.getpid())]
    subprocess.run(doctor, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    """
)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="ranks need Linux")


PATIENCE = 2.0  # s; by itself the doctor would end some seconds later


@pytest.fixture
def parent():
    process = subprocess.Popen([sys.executable, "-c", START], cwd=ROOT)
    yield process
    process.kill()
    process.wait()


def below(process: subprocess.Popen, word: str) -> list[psutil.Process]:
    """Waits until a descendant of `process` has `word` in its command line, and returns all descendants."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        try:
            found = psutil.Process(process.pid).children(recursive=True)
            if any(word in argument for child in found for argument in child.cmdline()):
                return found
        except psutil.NoSuchProcess:
            pass
        time.sleep(0.05)
    pytest.fail(f"no process with {word} was started")


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("number", "word"),
    [(signal.SIGTERM, "doctor"), (signal.SIGKILL, "parallel_backend.rank")],
    ids=["at its start", "with ranks"],
)
def test_the_doctor_and_its_ranks_end_with_the_process_that_started_them(parent, number, word):
    children = below(parent, word)
    parent.send_signal(number)
    parent.wait()
    wait_until(lambda: not any(is_running(child.pid) for child in children), PATIENCE)


def test_a_doctor_whose_parent_is_gone_does_nothing():
    done = subprocess.run(
        [sys.executable, "-m", "parallel_backend", "doctor", "--parent", "1"],
        cwd=ROOT,
        capture_output=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout) == (0, b"")
