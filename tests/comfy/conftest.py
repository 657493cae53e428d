"""One real ComfyUI on the CPU for all tests in this folder, driven over HTTP."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from comfy_harness import Comfy, start_comfyui
from comfyui_client import ComfyUIClient


@pytest.fixture(scope="session")
def comfy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Comfy]:
    """The shared ComfyUI; after the last test no process of it may be left."""
    server = start_comfyui(tmp_path_factory.mktemp("comfyui"))
    with server:
        yield Comfy(server=server, client=ComfyUIClient(server.url))
    assert server.survivors == [], f"left behind 2 s after ComfyUI ended: {server.survivors}"


@pytest.fixture(scope="session")
def measuring(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Comfy, Path]]:
    """A ComfyUI of its own that keeps measurements, in the folder that comes with it; the shared one keeps none.

    The pack lies where the manager puts it: ComfyUI serves no web files of a pack with a space in its name.
    """
    kept = tmp_path_factory.mktemp("kept")
    server = start_comfyui(
        tmp_path_factory.mktemp("comfyui"),
        pack_folder="comfyui-parallel-sampling",
        environment={"PARALLEL_SAMPLING_MEASUREMENTS": str(kept)},
    )
    with server:
        yield Comfy(server=server, client=ComfyUIClient(server.url)), kept


def pytest_itemcollected(item: pytest.Item) -> None:
    """Keep every test in this folder on one worker, so that there is one shared ComfyUI."""
    item.add_marker(pytest.mark.xdist_group("comfy"))
    item.add_marker(pytest.mark.comfy)
