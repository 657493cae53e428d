"""Rendezvous folders: groups and killed processes leave none behind, and nothing else is ever removed."""

import errno
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from parallel_backend.errors import PlatformError
from parallel_backend.sidecar.group.supervisor import PACK_ROOT, get_supervisor
from parallel_backend.sidecar.process import rendezvous
from parallel_backend.sidecar.process.rendezvous import RendezvousFolder, sweep

pytestmark = pytest.mark.usefixtures("no_leaks")

_MAKES_ONE = """
import time
from parallel_backend.sidecar.process.rendezvous import RendezvousFolder
folder = RendezvousFolder()
open(folder.store, "wb").write(b"keys")
print(folder.path, flush=True)
time.sleep(60)
"""


@pytest.fixture
def temp(tmp_path, monkeypatch):
    monkeypatch.setattr(rendezvous.tempfile, "tempdir", str(tmp_path))
    return tmp_path


@pytest.fixture
def another(temp):
    """Yields a process that holds a folder, and this folder."""
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(_MAKES_ONE)],
        cwd=PACK_ROOT,
        env={**os.environ, "TMPDIR": str(temp)},
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        yield process, Path(process.stdout.readline().strip())
        process.kill()


@pytest.fixture
def dead() -> int:
    """Returns a process id that no process has."""
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        pass
    return process.pid


def test_the_folder_of_a_process_that_was_killed_is_gone_with_the_next_one(temp, another):
    process, folder = another
    first = RendezvousFolder()
    assert folder.is_dir()  # its process lives
    process.kill()
    process.wait()
    assert folder.is_dir()
    second = RendezvousFolder()
    assert second.store != first.store
    assert not folder.exists() and Path(first.path).is_dir()
    first.remove()
    second.remove()
    assert list(temp.iterdir()) == []


def test_a_folder_that_is_locked_stays_whatever_its_process_id_says(temp, another, dead):
    """A container has its own process ids, but its temporary folder may be shared."""
    process, folder = another
    elsewhere = folder.rename(folder.with_name(f"parallel-backend-{dead}-abc"))
    sweep(temp)
    assert (elsewhere / "store").read_bytes() == b"keys"
    process.kill()
    process.wait()
    sweep(temp)
    assert not elsewhere.exists()


def test_nothing_but_what_ranks_leave_is_removed(temp, dead):
    mine = temp / "elsewhere"
    mine.mkdir()
    (mine / "store").write_text("a person's")
    name = f"parallel-backend-{dead}-"
    for folder, file in (("a", "picture.png"), ("b", "store")):
        (temp / f"{name}{folder}").mkdir()
        (temp / f"{name}{folder}" / file).write_text("x")
    (temp / f"{name}b" / "notes.txt").write_text("a person's")
    (temp / f"{name}c").symlink_to(mine, target_is_directory=True)
    (temp / f"{name}d").mkdir()
    (temp / f"{name}d" / "store").symlink_to(mine / "store")
    (temp / f"{name}e").mkdir()
    (temp / f"{name}e" / "store").mkdir()
    (temp / f"{name}f").write_text("a file")
    (temp / f"parallel-backend-{'9' * 30}-a").mkdir()
    (temp / f"{name}Mine").mkdir()
    before = sorted(temp.rglob("*"))
    (temp / f"{name}gone").mkdir()
    (temp / f"{name}gone" / "store").write_text("x")
    sweep(temp)
    assert sorted(temp.rglob("*")) == before


@pytest.mark.real_start
def test_a_start_without_descriptors_leaves_nothing(temp, monkeypatch):
    def none_left(*_):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    for what in ("memfd_create", "pidfd_open"):
        with monkeypatch.context() as short:
            short.setattr(os, what, none_left)
            with pytest.raises(OSError, match="Too many open files"):
                get_supervisor().spawn(("cpu:0",), "tests.support.rank_programs.scripted_rank")
        assert list(temp.iterdir()) == []


def test_a_folder_that_takes_no_files_is_refused_in_words(temp, monkeypatch):
    monkeypatch.setattr(rendezvous.tempfile, "tempdir", str(temp / "missing"))
    with pytest.raises(PlatformError, match=r"takes no files \(No such file or directory\).*TMPDIR"):
        RendezvousFolder()
