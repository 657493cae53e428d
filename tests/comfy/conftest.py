"""One real ComfyUI on the CPU for all tests in this folder, driven over HTTP."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from comfy_harness import Comfy, start_comfyui
from comfyui_client import ComfyUIClient
from parallel_backend.options import COMPILE_BACKEND
from parallel_backend.sidecar.process import device_lock
from second_comfyui import SecondComfyUI, second_comfyui

# By the ending of the name that it goes by, the folder of a test-only pack.
_PACKS = {
    "ways": "inject_ways",
    "popular": "inject_packs/popular",
    "routes": "inject_packs/routes",
    **{way: "inject_packs/fails" for way in ("breaks", "hangs", "ends", "raises", "locks")},
}
_BROWSERS = ("chromium", "chromium-browser", "google-chrome")


@pytest.fixture(scope="session")
def comfy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Comfy]:
    """The shared ComfyUI, whose ranks are forks; after the last test no process of it may be left."""
    base = tmp_path_factory.mktemp("comfyui")
    environment = {
        "PARALLEL_SAMPLING_LOG": str(base / "ranks.jsonl"),
        COMPILE_BACKEND: "eager",
        "PARALLEL_TEST_FORKED_RANKS": "1",
        device_lock.VARIABLE: str(base / "locks"),
        device_lock.CPU_TOO: "on",
    }
    server = start_comfyui(base, environment=environment)
    with server:
        yield Comfy(server=server, client=ComfyUIClient(server.url))
    assert server.survivors == [], f"left behind after ComfyUI ended: {server.survivors}"


@pytest.fixture(scope="session")
def packs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Comfy]:
    """A ComfyUI with packs that change models and ComfyUI itself in every way that packs do."""
    base = tmp_path_factory.mktemp("packs")
    environment = {
        "PARALLEL_SAMPLING_LOG": str(base / "ranks.jsonl"),
        "PARALLEL_TEST_FORKED_RANKS": "1",
    }
    folder = Path(__file__).parent
    (base / "custom_nodes").mkdir()
    for name, pack in _PACKS.items():
        (base / "custom_nodes" / f"parallel_test_{name}").symlink_to(folder / pack)
    server = start_comfyui(base, environment=environment)
    with server:
        yield Comfy(server=server, client=ComfyUIClient(server.url))
    assert server.survivors == [], f"left behind after ComfyUI ended: {server.survivors}"


@pytest.fixture(scope="session")
def measuring(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Comfy, Path]]:
    """A ComfyUI of its own that keeps measurements, in the folder that comes with it; the shared one keeps none.

    The pack lies where the manager puts it: ComfyUI serves no web files of a pack with a space in its name.
    """
    kept = tmp_path_factory.mktemp("kept")
    base = tmp_path_factory.mktemp("comfyui")
    settings = base / "user" / "default" / "comfy.settings.json"
    settings.parent.mkdir(parents=True)
    settings.write_text(
        '{"Comfy.TutorialCompleted": true}'
    )  # else templates greet a new user, over everything
    server = start_comfyui(
        base,
        pack_folder="comfyui-parallel-sampling",
        environment={"PARALLEL_SAMPLING_MEASUREMENTS": str(kept)},
    )
    with server:
        yield Comfy(server=server, client=ComfyUIClient(server.url)), kept


@pytest.fixture(scope="session")
def _second(comfy: Comfy, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecondComfyUI]:
    locks = comfy.server.base_directory / "locks"
    second = second_comfyui(tmp_path_factory.mktemp("second"), locks)
    yield second
    second.server.stop()
    assert second.server.survivors == []


@pytest.fixture
def second(_second: SecondComfyUI) -> SecondComfyUI:
    """A second ComfyUI, which runs."""
    _second.running()
    return _second


@pytest.fixture(scope="session")
def browser():
    """An installed Chromium without a window."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    path = next(filter(None, map(shutil.which, _BROWSERS)), None)
    if path is None:
        pytest.skip("no Chromium is installed")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=path, args=["--no-sandbox", "--disable-dev-shm-usage"]
        )
        yield browser
        browser.close()


@pytest.fixture
def page(browser, measuring):
    """ComfyUI's page with this pack's extensions loaded. Fails the test for errors of theirs in the console."""
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    problems: list[str] = []
    page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.goto(measuring[0].server.url)
    page.wait_for_function("() => window.app?.extensionManager && window.app?.graph", timeout=60_000)
    for script in (Path(__file__).resolve().parents[2] / "web").glob("*.js"):
        name = f"parallel_sampling.{script.stem}"
        page.wait_for_function(f"() => app.extensions.some(e => e.name === '{name}')", timeout=60_000)
    yield page
    page.close()
    assert [text for text in problems if "parallel" in text.lower()] == []


@pytest.fixture(params=["canvas", "vue"])
def drawn_by(page, request):
    """How ComfyUI draws nodes."""
    page.evaluate(
        "on => app.extensionManager.setting.set('Comfy.VueNodes.Enabled', on)", request.param == "vue"
    )
    yield request.param
    page.evaluate("() => app.extensionManager.setting.set('Comfy.VueNodes.Enabled', false)")


def pytest_itemcollected(item: pytest.WorkItem) -> None:
    """Keep the tests of each shared ComfyUI on one worker, so that there is one of each."""
    server = next((own for own in ("measuring", "door", "packs") if own in item.fixturenames), "comfy")
    item.add_marker(pytest.mark.xdist_group(server))
    item.add_marker(pytest.mark.comfy)
