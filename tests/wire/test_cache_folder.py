"""The cache folder, by the environment variables that set it; the folder of locks, which is this user's alone."""

import os
import stat
import tempfile
from pathlib import Path

import pytest

from parallel_backend.wire.cache_folder import FOLDER, VARIABLE, cache_folder, lock_folder


@pytest.mark.parametrize(
    ("environ", "folder"),
    [
        ({"XDG_CACHE_HOME": "/cache", "HOME": "/home/x"}, "/cache/comfyui-parallel-sampling"),
        ({"XDG_CACHE_HOME": "cache", "HOME": "/home/x"}, "/home/x/.cache/comfyui-parallel-sampling"),
        ({"HOME": "/home/x"}, "/home/x/.cache/comfyui-parallel-sampling"),
        ({}, None),
        ({VARIABLE: "/elsewhere", "HOME": "/home/x"}, "/elsewhere"),
        ({VARIABLE: "off", "HOME": "/home/x"}, None),
    ],
)
def test_the_cache_folder_is_where_the_desktop_says(environ, folder):
    assert cache_folder(environ) == (Path(folder) if folder else None)


def test_the_folder_of_locks_is_private(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert lock_folder() == lock_folder() == tmp_path / f"{FOLDER}-{os.getuid()}"
    assert stat.S_IMODE(lock_folder().stat().st_mode) == 0o700


@pytest.mark.parametrize("obstacle", ["a file", "a link", "open to others"])
def test_a_folder_of_locks_that_others_could_write_to_is_refused(tmp_path, monkeypatch, obstacle):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = tmp_path / f"{FOLDER}-{os.getuid()}"
    if obstacle == "a file":
        folder.write_text("")
    elif obstacle == "a link":
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        folder.symlink_to(tmp_path / "elsewhere")
    else:
        folder.mkdir()
        folder.chmod(0o777)
    with pytest.raises(PermissionError) as refused:
        lock_folder()
    assert refused.value.filename == str(folder)
