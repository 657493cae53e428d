"""Files that change while a job runs: after a crash the job ends and names the file; the next job uses the new one."""

import os
import signal
from pathlib import Path

import pytest

from parallel_backend.errors import CheckpointError
from parallel_backend.wire.file_identity import read_identity
from scripted import SLOW, scripted_request, scripted_weights, two_ranks


@pytest.fixture
def spec(tmp_path):
    return scripted_weights(tmp_path / "module.safetensors", "loads 2.0")


def replace_file(spec, script="loads 3.0"):
    """Writes a new file next to the old one and renames it, as download tools do."""
    beside = Path(spec.path).with_suffix(".part")
    beside.write_text(script)
    beside.replace(spec.path)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (replace_file, "was replaced by another file"),
        (lambda spec: Path(spec.path).write_text("loads 4.0"), "was changed in place"),
        (lambda spec: Path(spec.path).unlink(), "was removed"),
    ],
    ids=["replaced", "in place", "deleted"],
)
def test_a_job_whose_ranks_crash_is_not_made_again_with_another_file(resuming_sidecar, spec, change, words):
    def on_step(step, steps, denoised):
        if step == 2:
            change(spec)
            os.kill(resuming_sidecar.pids[1], signal.SIGKILL)

    with pytest.raises(CheckpointError, match=rf"module\.safetensors {words} while the job ran"):
        resuming_sidecar.sample(spec, scripted_request(SLOW, steps=100), two_ranks(), on_step=on_step)
    replace_file(spec)
    assert resuming_sidecar.sample(spec, scripted_request(), two_ranks()).info.notes == ()


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
