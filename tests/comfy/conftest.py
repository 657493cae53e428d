"""The real ComfyUIs on the CPU that the tests in this folder drive over HTTP, and a browser on ComfyUI's page."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from cluster_machines import make_cluster
from comfy_harness import Comfy, start_comfyui
from comfyui_server import ComfyUIServer, free_port
from lora_files import write_loras
from pages import wait_for_extensions
from parallel_backend.cluster import endpoint as endpoints
from parallel_backend.observability.logs import queue_log
from parallel_backend.options import COMPILE_BACKEND
from parallel_backend.sidecar.process import device_lock

# {ending of a test-only pack's name in custom_nodes: its folder here}
_PACKS = {
    "ways": "inject_ways",
    "popular": "inject_packs/popular",
    "routes": "inject_packs/routes",
    "places": "inject_packs/places",
    **{way: "inject_packs/fails" for way in ("breaks", "hangs", "ends", "raises")},
}
_BROWSERS = ("chromium", "chromium-browser", "google-chrome")
_WINDOW = {"width": 1280, "height": 900}
_PATIENCE = 120_000  # ms; far more than anything on the page takes on an idle machine
_GET = "name => app.extensionManager.setting.get(name)"
_SET = "([name, value]) => app.extensionManager.setting.set(name, value)"
_CLEAR = """async () => {
  localStorage.clear();
  const { sidebarTab, toast, workflow } = app.extensionManager;
  for (const dialog of document.querySelectorAll('dialog[open]')) dialog.close();
  if (sidebarTab.activeSidebarTabId) sidebarTab.toggleSidebarTab(sidebarTab.activeSidebarTabId);
  (toast.dismissAll ?? toast.removeAll)();
  await app.loadGraphData({ nodes: [], links: [], version: 0.4, id: crypto.randomUUID() }, true, true, 'empty');
  const others = workflow.openWorkflows.filter(one => !workflow.isActive(one));
  for (const other of others) await workflow.closeWorkflow(other);
}"""


@contextmanager
def _running(base: Path, environment: dict[str, str], **options: str) -> Iterator[Comfy]:
    """Yields a ComfyUI whose ranks are forks. Fails if a process outlives it, or if it or a rank found a model that had
    lost its patcher."""
    server = start_comfyui(base, environment={"PARALLEL_TEST_FORKED_RANKS": "1", **environment}, **options)
    with server:
        yield Comfy(server)
    assert server.survivors == [], f"left behind after ComfyUI ended: {server.survivors}"
    leaks = [line for line in server.log.read_text().splitlines() if "WARNING, memory leak" in line]
    assert leaks == []


def _logging(base: Path) -> dict[str, str]:
    return {"PARALLEL_SAMPLING_LOG": str(base / "ranks.jsonl")}


def _write_settings(base: Path, settings: dict[str, object]) -> None:
    path = base / "user" / "default" / "comfy.settings.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(settings))


@pytest.fixture(scope="session")
def comfy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Comfy]:
    """The shared ComfyUI, whose ranks are forks. None of its processes may be left after the last test."""
    base = tmp_path_factory.mktemp("comfyui")
    locks = {device_lock.VARIABLE: str(base / "locks"), device_lock.CPU_TOO: "on"}
    with _running(base, {**_logging(base), COMPILE_BACKEND: "eager", **locks}) as comfy:
        yield comfy


@pytest.fixture(scope="session")
def unet(comfy: Comfy) -> str:
    """The name of a tiny Flux in the loader's list, with two blocks of each kind."""
    return comfy.write_flux("tiny_two_blocks.safetensors", double_blocks=2, single_blocks=2)


@pytest.fixture(scope="session")
def loras(comfy: Comfy) -> dict[str, str]:
    """The names of LoRAs for that Flux in the loader's list: valid ones by layout, bad ones by their fault."""
    return write_loras(comfy.models("loras"))


@pytest.fixture(scope="session")
def packs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Comfy]:
    """A ComfyUI with test-only packs, which change models and ComfyUI itself in the ways that real packs do."""
    base = tmp_path_factory.mktemp("packs")
    folder = Path(__file__).parent
    (base / "custom_nodes").mkdir()
    for name, pack in _PACKS.items():
        (base / "custom_nodes" / f"parallel_test_{name}").symlink_to(folder / pack)
    with _running(base, _logging(base)) as comfy:
        yield comfy


@pytest.fixture(scope="session")
def measuring(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Comfy]:
    """A separate ComfyUI that stores measurements, in its folder `kept`; the shared one stores none.

    The pack's folder has the name that ComfyUI Manager gives it: ComfyUI serves no web files of a pack with a space in
    its name.
    """
    base = tmp_path_factory.mktemp("comfyui")
    _write_settings(base, {"Comfy.TutorialCompleted": True})  # else the templates cover a new user's page
    environment = {"PARALLEL_SAMPLING_MEASUREMENTS": str(base / "kept")}
    with _running(base, environment, pack_folder="comfyui-parallel-sampling") as comfy:
        yield comfy


@dataclass(frozen=True)
class SecondComfyUI:
    """A second ComfyUI: it shares device locks with the first one, and is the head of cluster lab. Its ranks start on
    `devices` when it launches, by real starts as outside tests. Its start costs as much as all tests that need it.

    `secret`: the machines' secret file; `port`: the port to which machines connect.
    """

    server: ComfyUIServer
    queue_log: Path
    secret: Path
    port: int
    devices: str = "cpu:4,cpu:5"

    def running(self) -> Comfy:
        """Returns it running. Starts it if necessary: a test may have killed it."""
        if not self.server.is_started:
            self.server.start()
        return Comfy(self.server)


@pytest.fixture(scope="session")
def second(comfy: Comfy, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecondComfyUI]:
    """The second ComfyUI, not started yet."""
    base, port = tmp_path_factory.mktemp("second"), free_port()
    chosen = {"start_at_launch": True, "default_devices": SecondComfyUI.devices}
    _write_settings(base, {f"parallel_sampling.{name}": value for name, value in chosen.items()})
    environment = {
        queue_log.VARIABLE: str(base / "queue"),
        endpoints.VARIABLE: str(base / "secrets"),
        device_lock.VARIABLE: str(comfy.server.base_directory / "locks"),
        device_lock.CPU_TOO: "on",
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(endpoints.VARIABLE, str(base / "secrets"))
        secret = make_cluster(base / "secrets", port=port)
    server = start_comfyui(base, pack_folder="parallel.pack v2", environment=environment)
    yield SecondComfyUI(server, base / "queue", secret, port)
    server.stop()
    assert server.survivors == []


@pytest.fixture(scope="session")
def browser():
    """The installed Chromium, without a window."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    path = next(filter(None, map(shutil.which, _BROWSERS)), None)
    if path is None:
        pytest.skip("no Chromium is installed")
    with sync_api.sync_playwright() as playwright:
        arguments = ["--no-sandbox", "--disable-dev-shm-usage"]
        browser = playwright.chromium.launch(executable_path=path, args=arguments)
        yield browser
        browser.close()


class _Tab:
    """ComfyUI's page, which all tests share: a load takes longer than most tests. It is cleaned before each test."""

    def __init__(self, browser, url: str) -> None:
        self._browser, self._url = browser, url
        self._page = None
        self._language = "en"
        self.problems: list[str] = []  # errors in the console

    def ready(self, language: str):
        """Returns the page in a language: an empty workflow, no dialog, no toast, nothing in the browser's storage."""
        page, self._page = self._page, None  # a page that fails here is not used again
        self.problems.clear()
        if page is None:
            page = self._opened()
        else:
            page.unroute_all(behavior="ignoreErrors")
            page.set_viewport_size(_WINDOW)
            page.evaluate(_CLEAR)
        self._page = page
        if language != self._language:
            page.evaluate(_SET, ["Comfy.Locale", language])
            self._language = language
            page.reload()  # else ComfyUI reloads the workflow some time later, and discards what a test shows
            wait_for_extensions(page)
        return page

    def close(self) -> None:
        if self._page is not None:
            self._page.context.close()
        self._page = None

    def _opened(self):
        page = self._browser.new_page(viewport=_WINDOW)
        page.set_default_timeout(_PATIENCE)
        page.on("console", lambda told: self.problems.append(told.text) if told.type == "error" else None)
        page.on("pageerror", lambda error: self.problems.append(str(error)))
        page.goto(self._url)
        wait_for_extensions(page)
        return page


@pytest.fixture(scope="session")
def _tab(browser, measuring, request):
    """The shared page. First writes its tests' MODELS = {file: number of single blocks}, so that it lists them."""
    for module in {item.module for item in request.session.items if "page" in item.fixturenames}:
        for name, blocks in getattr(module, "MODELS", {}).items():
            measuring.write_flux(name, single_blocks=blocks)
    tab = _Tab(browser, measuring.server.url)
    yield tab
    tab.close()


@pytest.fixture
def language(request) -> str:
    """The language of the page, English unless a test gives another one by indirect parametrization."""
    return getattr(request, "param", "en")


@pytest.fixture
def page(_tab, language, request):
    """ComfyUI's page with this pack's extensions loaded. A console error of theirs fails the test."""
    failed = request.session.testsfailed
    yield _tab.ready(language)
    problems = [text for text in _tab.problems if "parallel" in text.lower()]
    if problems or request.session.testsfailed > failed:
        _tab.close()  # the next test gets a new page
    assert problems == []


@pytest.fixture
def set_setting(page):
    """A function that sets one of ComfyUI's settings until the test ends: tests share the server, which stores them."""
    before = {}

    def set_one(name: str, value: object) -> None:
        before.setdefault(name, page.evaluate(_GET, name))
        page.evaluate(_SET, [name, value])

    yield set_one
    for name, value in before.items():
        page.evaluate(_SET, [name, value])


@pytest.fixture(params=["canvas", "vue"])
def drawn_by(set_setting, request):
    """The way in which ComfyUI draws nodes: on its canvas, or as Vue elements."""
    set_setting("Comfy.VueNodes.Enabled", request.param == "vue")
    return request.param


def pytest_itemcollected(item: pytest.WorkItem) -> None:
    """Runs the tests of each ComfyUI on one worker, so that each ComfyUI starts only once.

    The shared one starts twice, each for half of its modules: it has the most tests, and the run would wait for it.
    """
    own = ("measuring", "door", "packs", "second", "comfy")
    server = next((one for one in own if one in item.fixturenames), "none of them")
    if server == "comfy" and item.path.name > "test_p":
        server = "second"
    item.add_marker(pytest.mark.xdist_group(server))
    item.add_marker(pytest.mark.comfy)
