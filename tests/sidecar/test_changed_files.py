"""Files that change while a job runs: it keeps its first one or ends by name, and the next job takes the new one."""

import os
import signal
from pathlib import Path

import pytest
import torch

from parallel_backend.errors import CheckpointError
from parallel_backend.requests import ModuleCall
from parallel_backend.wire.file_identity import read_identity
from scripted import SLOW, scripted_request, scripted_sidecar, scripted_weights, two_ranks


@pytest.fixture
def spec(tmp_path):
    return scripted_weights(tmp_path / "module.safetensors", "loads 2.0")


@pytest.fixture
def sidecar(no_leaks):
    made = scripted_sidecar(resumes=True)
    yield made
    made.stop()


def replace_file(spec, script="loads 3.0"):
    """As download tools do: written beside it, then renamed."""
    beside = Path(spec.path).with_suffix(".part")
    beside.write_text(script)
    beside.replace(spec.path)


def scale_of(sidecar, spec, file=None):
    answer, _ = sidecar.call(spec, ModuleCall((torch.ones(1),), {}, rows=1), two_ranks(), file=file)
    return (answer[0] if isinstance(answer, (list, tuple)) else answer).item()


@pytest.mark.parametrize(
    "change", [replace_file, lambda spec: Path(spec.path).unlink()], ids=["replaced", "deleted"]
)
def test_calls_of_one_job_stay_with_the_file_that_it_began_with(sidecar, spec, change):
    file = read_identity(spec.path)
    assert scale_of(sidecar, spec, file) == 2.0
    change(spec)
    assert scale_of(sidecar, spec, file) == 2.0
    replace_file(spec, "loads 5.0")
    assert scale_of(sidecar, spec) == 5.0  # the next job


def test_a_call_on_ranks_started_anew_refuses_another_file_by_name(sidecar, spec):
    file = read_identity(spec.path)
    assert scale_of(sidecar, spec, file) == 2.0
    sidecar.stop()
    replace_file(spec)
    with pytest.raises(
        CheckpointError, match=r"module\.safetensors was replaced by another file while the job ran"
    ):
        scale_of(sidecar, spec, file)
    assert scale_of(sidecar, spec) == 3.0


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (replace_file, "was replaced by another file"),
        (lambda spec: Path(spec.path).write_text("loads 4.0"), "was changed in place"),
        (lambda spec: Path(spec.path).unlink(), "was removed"),
    ],
    ids=["replaced", "in place", "deleted"],
)
def test_a_job_whose_ranks_crash_does_not_go_on_with_another_file(sidecar, spec, change, words):
    def on_step(step, steps, denoised):
        if step == 2:
            change(spec)
            os.kill(sidecar.pids[1], signal.SIGKILL)

    with pytest.raises(CheckpointError, match=rf"module\.safetensors {words} while the job ran"):
        sidecar.sample(spec, scripted_request(SLOW, steps=100), two_ranks(), on_step=on_step)
    replace_file(spec)
    assert sidecar.sample(spec, scripted_request(), two_ranks()).info.notes == ()


def test_a_job_goes_on_after_a_crash_while_its_file_is_the_same(sidecar, spec):
    killed = []

    def on_step(step, steps, denoised):
        if step == 2 and not killed:
            killed.append(os.kill(sidecar.pids[1], signal.SIGKILL))

    result = sidecar.sample(spec, scripted_request(SLOW, steps=8), two_ranks(), on_step=on_step)
    assert len(result.info.step_seconds) == 8 and "goes on after step" in " ".join(result.info.notes)


def test_a_change_in_place_is_said_and_the_next_job_takes_the_new_contents(sidecar, spec):
    def on_step(step, steps, denoised):
        if step == 2:
            Path(spec.path).write_text("loads 4.0")

    result = sidecar.sample(spec, scripted_request(), two_ranks(), on_step=on_step)
    assert any(
        "module.safetensors was changed in place while the job ran" in note for note in result.info.notes
    )
    assert scale_of(sidecar, spec) == 4.0


def test_a_file_changed_with_its_old_size_and_time_is_another_one(tmp_path):
    path = tmp_path / "a.safetensors"
    path.write_bytes(b"\x04\0\0\0\0\0\0\0{ 1}data")
    before, status = read_identity(path), path.stat()
    path.write_bytes(b"\x04\0\0\0\0\0\0\0{ 2}data")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    after = read_identity(path)
    assert (after.size, after.mtime_ns, after.inode) == (before.size, before.mtime_ns, before.inode)
    assert after != before


def test_a_pipe_is_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "pipe.safetensors")
    with pytest.raises(CheckpointError, match="no regular file"):
        read_identity(tmp_path / "pipe.safetensors")
