"""The cache folder, by the environment variables that set it."""

from pathlib import Path

import pytest

from parallel_backend.wire.cache_folder import VARIABLE, cache_folder


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
