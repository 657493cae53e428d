"""The process of a self-test: its answer, its crash, its time limit, cancelling it, its death with its parent."""

import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from parallel_backend.errors import Cancelled, RankFailed
from parallel_backend.sidecar import self_test
from parallel_backend.sidecar.self_test import run_self_tests
from parallel_backend.wire import deadlines
from parallel_backend.wire.checks.findings import SelfTest
from scripted import is_running
from waiting import wait_until

pytestmark = pytest.mark.real_start
PROGRAM = "tests.support.rank_programs.self_test_script"


def run(folder, *names, **options):
    return run_self_tests(str(folder), names, module=PROGRAM, **options)


@pytest.fixture
def silent(tmp_path):
    folder = tmp_path / "silent"
    folder.mkdir()
    return folder


def has_pid(folder):
    return (folder / "pid").is_file() and bool((folder / "pid").read_text())


def pid_of(folder):
    wait_until(lambda: has_pid(folder))
    return int((folder / "pid").read_text())


def test_each_class_has_its_outcome_in_turn(tmp_path, no_leaks):
    found = run(tmp_path / "good", "Flux", "WanModel")
    assert found == (SelfTest("Flux", "block", 0.07), SelfTest("WanModel", "block", 0.07))


@pytest.mark.parametrize(
    ("manner", "words"), [("crash", "(?s)SIGABRT.*out of luck"), ("noise", "code 0"), ("short", "code 0")]
)
def test_without_an_outcome_for_each_there_is_none(tmp_path, no_leaks, manner, words):
    with pytest.raises(RankFailed, match=words) as failed:
        run(tmp_path / manner, "Flux", "WanModel")
    assert failed.value.crashed


def test_one_that_takes_too_long_is_ended(silent, no_leaks, monkeypatch):
    """The clock stands still until the process has started."""
    clock = SimpleNamespace(monotonic=lambda: 10.0 * has_pid(silent), sleep=time.sleep)
    monkeypatch.setattr(self_test, "time", clock)
    monkeypatch.setattr(deadlines, "START", 1.0)
    monkeypatch.setattr(deadlines, "SELF_TEST", 0.0)
    with pytest.raises(RankFailed, match="did not end within 1 s"):
        run(silent, "Flux")
    assert not is_running(pid_of(silent))


def test_it_is_ended_when_it_is_cancelled(silent, no_leaks):
    with pytest.raises(Cancelled):
        run(silent, "Flux", should_cancel=lambda: has_pid(silent))
    assert not is_running(pid_of(silent))


def test_it_dies_with_the_process_that_started_it(silent, tmp_path):
    """Uses the real program, which first ties itself to its parent: it has barely started when that is killed."""
    code = (
        "import sys; from parallel_backend.sidecar import self_test; "
        "popen = self_test.subprocess.Popen\n"
        "def tell(*args, **kwargs):\n"
        "    process = popen(*args, **kwargs)\n"
        "    print(process.pid, flush=True)\n"
        "    return process\n"
        "self_test.subprocess.Popen = tell\n"
        "self_test.run_self_tests(sys.argv[1], ['Flux'])"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], cwd=Path(__file__).parents[2], stdout=subprocess.PIPE
    ) as parent:
        child = int(parent.stdout.readline())
        time.sleep(0.1)
        parent.kill()
    wait_until(lambda: not is_running(child))
    assert os.getpid() != child
