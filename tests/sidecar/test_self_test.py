"""The rank of a self-test: its answer, its crash, its time limit, cancelling it."""

import time
from types import SimpleNamespace

import pytest

from parallel_backend.errors import Cancelled, RankFailed
from parallel_backend.sidecar import self_test
from parallel_backend.wire.checks.findings import SelfTest
from scripted import is_running
from waiting import wait_until

pytestmark = pytest.mark.usefixtures("no_leaks")
PROGRAM = "tests.support.rank_programs.self_test_script"


def run(folder, *names, **options):
    return self_test.run_self_tests(str(folder), names, rank_module=PROGRAM, **options)


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


def test_each_class_has_its_outcome_in_turn_and_no_listener_hears_of_the_rank(tmp_path, events):
    found = run(tmp_path / "good", "Flux", "WanModel")
    assert found == (SelfTest("Flux", "block", 0.07), SelfTest("WanModel", "block", 0.07))
    assert events == []


def test_one_that_crashes_has_no_outcome(tmp_path):
    with pytest.raises(RankFailed, match="the self-test failed: killed by SIGABRT") as failed:
        run(tmp_path / "crash", "Flux", "WanModel")
    assert failed.value.crashed


def test_a_folder_without_comfyui_is_no_outcome(tmp_path):
    with pytest.raises(RankFailed, match=r"the self-test failed: .* is not ComfyUI's folder"):
        self_test.run_self_tests(str(tmp_path), ["Flux"])


def test_one_that_takes_too_long_is_ended(silent, monkeypatch):
    """The clock stands still until the test has started."""
    clock = SimpleNamespace(monotonic=lambda: 10.0 * has_pid(silent), sleep=time.sleep)
    monkeypatch.setattr(self_test, "time", clock)
    limits = SimpleNamespace(START=1.0, SELF_TEST=0.0)
    monkeypatch.setattr(self_test, "deadlines", limits)
    with pytest.raises(RankFailed, match="did not end within 1 s"):
        run(silent, "Flux")
    assert not is_running(pid_of(silent))


def test_it_is_ended_when_it_is_cancelled(silent):
    with pytest.raises(Cancelled):
        run(silent, "Flux", should_cancel=lambda: has_pid(silent))
    assert not is_running(pid_of(silent))
