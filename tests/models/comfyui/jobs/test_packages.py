"""Packs' modules in ranks: processes of one parent import packs one after the other, and leave no file of it."""

import os
import subprocess
import sys

import pytest

from parallel_backend.wire.cache_folder import FOLDER

_PACK = """
import os, pathlib, time
busy = pathlib.Path(__file__).with_name("busy")
os.close(os.open(busy, os.O_CREAT | os.O_EXCL))  # raises an error if another process imports this pack now
time.sleep(0.3)
busy.unlink()
"""
_RANK = """
import contextlib, sys
from parallel_backend.models.comfyui.jobs.packages import Packages
name, file = sys.argv[1:]
packages = Packages(str(file.rpartition("/")[0]), "own", {name: (file, False)}, [], {}, contextlib.nullcontext)
packages.import_packs([name])
assert name in sys.modules
"""


@pytest.mark.parametrize("killed", [False, True])
def test_processes_take_turns_and_leave_no_lock(tmp_path, killed):
    (tmp_path / "folder_paths.py").write_text("")
    pack = tmp_path / "pack.py"
    pack.write_text(_PACK)
    command = [sys.executable, "-c", _RANK, str(tmp_path / "pack"), str(pack)]
    environ = {**os.environ, "TMPDIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    locks = tmp_path / f"{FOLDER}-{os.getuid()}"
    if killed:  # a rank that was killed while it imported left its file, which nobody holds now
        locks.mkdir(mode=0o700)
        (locks / f"imports-{os.getpid()}").touch()
    ranks = [subprocess.Popen(command, env=environ, stderr=subprocess.PIPE, text=True) for _ in range(3)]
    assert [(rank.communicate()[1], rank.returncode) for rank in ranks] == [("", 0)] * 3
    assert not list(locks.iterdir())
