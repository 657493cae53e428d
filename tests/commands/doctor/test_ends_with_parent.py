"""A doctor that another process started ends when that process ends.

Its ranks do as well: tests/comfy/test_other_comfyui.py kills a ComfyUI whose doctor has some.
"""

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from scripted import is_running
from waiting import wait_until

ROOT = Path(__file__).resolve().parents[3]
START = """
import os, subprocess, sys
doctor = [sys.executable, "-m", "parallel_backend", "doctor", "--parent", str(os.getpid())]
subprocess.run(doctor, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
"""

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="ranks need Linux")
PATIENCE = 2.0  # s; by itself the doctor would end some seconds later


@pytest.fixture
def parent():
    process = subprocess.Popen([sys.executable, "-c", START], cwd=ROOT)
    yield process
    process.kill()
    process.wait()


def test_the_doctor_ends_with_the_process_that_started_it(parent):
    children = psutil.Process(parent.pid).children
    wait_until(lambda: any("doctor" in child.cmdline() for child in children()))
    (doctor,) = children()
    parent.terminate()
    parent.wait()
    wait_until(lambda: not is_running(doctor.pid), PATIENCE)


def test_a_doctor_whose_parent_is_gone_does_nothing():
    done = subprocess.run(
        [sys.executable, "-m", "parallel_backend", "doctor", "--parent", "1"],
        cwd=ROOT,
        capture_output=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout) == (0, b"")
