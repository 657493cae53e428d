"""./scripts/test runs the pinned ComfyUI and Python, or those named by options, and the whole suite in two halves."""

import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import run_tests
from comfyui_copies import make_comfyui
from steps import SetupError


@pytest.fixture
def other(tmp_path):
    return make_comfyui(tmp_path, "0.33.0")


def started(monkeypatch, *arguments: str) -> dict:
    """Returns the environment and the command that this process would become, and its signal handlers."""
    found = {}

    def become(environment, *command):
        found.update(environment=environment, command=command)

    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")  # `main` removes it, which must end with the test
    monkeypatch.setattr(run_tests, "become", become)
    monkeypatch.setattr(run_tests, "prepare", lambda comfyui=None: ("prepared with", comfyui))
    monkeypatch.setattr(run_tests.os, "chdir", lambda folder: None)
    monkeypatch.setattr(run_tests.signal, "signal", found.__setitem__)
    monkeypatch.setattr(sys, "argv", ["test", *arguments])
    run_tests.main()
    return found


def test_pytest_gets_all_other_arguments(monkeypatch, other):
    found = started(monkeypatch, "tests/comfy", "-k", "merge", "--comfyui", str(other), "-x")
    assert found["environment"] == ("prepared with", str(other))
    assert found["command"][-4:] == ("tests/comfy", "-k", "merge", "-x")
    assert started(monkeypatch, "tests/job")["environment"] == ("prepared with", None)


def test_with_a_python_of_its_own_nothing_is_installed(monkeypatch, other):
    found = started(monkeypatch, "--comfyui", str(other), "--python", sys.executable)["environment"]
    assert (found.python, found.comfyui) == (Path(sys.executable).absolute(), other.resolve())


def test_what_runs_in_the_background_of_a_script_can_be_interrupted(monkeypatch):
    assert started(monkeypatch, "tests/job")[signal.SIGINT] is signal.SIG_DFL


@pytest.mark.parametrize("failing", ["", "not page", "tests/comfy"])
def test_the_whole_suite_runs_the_tests_of_the_page_after_all_others_and_alone(tmp_path, failing):
    for name in ("test", "find_python.sh"):
        shutil.copy(Path(run_tests.__file__).with_name(name), tmp_path)
    seen = tmp_path / "seen"
    (tmp_path / "run_tests.py").write_text(
        f"import sys\nopen({str(seen)!r}, 'a').write(' '.join(sys.argv[1:]) + '\\n')\n"
        f"sys.exit({failing!r} in sys.argv)\n"
    )
    assert subprocess.run([tmp_path / "test"]).returncode == bool(failing)
    assert seen.read_text().splitlines() == ["-m not page", "tests/comfy -m page -n 0"]
    seen.unlink()
    assert subprocess.run([tmp_path / "test", "tests/job", "-x"]).returncode == 0
    assert seen.read_text() == "tests/job -x\n"


def test_what_is_not_there_is_named(monkeypatch, other, tmp_path):
    with pytest.raises(SetupError, match="no-such-python"):
        started(monkeypatch, "--comfyui", str(other), "--python", "no-such-python")
    (tmp_path / "empty").mkdir()
    with pytest.raises(SetupError, match="empty"):
        started(monkeypatch, "--comfyui", str(tmp_path / "empty"), "--python", sys.executable)
