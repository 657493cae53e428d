"""Photographs Strategy Selector, the status panel and *Prove it* in ComfyUI's own page, for their help.

``python scripts/draw_panels.py`` starts a real ComfyUI on the CPU, needs playwright and an installed Chromium, and
writes ``web/docs/StrategySelector*.png``, ``docs/images/status_panel.png`` and ``docs/images/prove_it.png``. Each
picture of Strategy Selector stores the words that it shows, so that a test can tell when it is out of date.
"""

from __future__ import annotations

import io
import json
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

from PIL import Image

from comfyui_server import ComfyUIServer
from comfyui_source import find_comfyui
from drawn_from import save
from steps import SetupError, exit_on_setup_error

ROOT = Path(__file__).resolve().parent.parent
PAGES = ROOT / "web" / "docs"
WORKFLOW = ROOT / "example_workflows" / "Try it without a download.json"
READY = "() => window.app?.extensionManager && app.extensions.some(e => e.name === 'parallel_sampling.strategy_panel')"
# Loads the graph, removes all nodes but one, and makes that one as tall as its content.
ALONE = """async ([workflow, type, values, height]) => {
  await app.loadGraphData(workflow);
  const node = app.graph.nodes.find(n => n.type === type);
  for (const other of [...app.graph.nodes]) if (other !== node) app.graph.remove(other);
  for (const group of [...app.graph.groups]) app.graph.remove(group);
  for (const widget of node.widgets) if (widget.name in values) {
    widget.value = values[widget.name];
    widget.callback?.(widget.value);
  }
  node.setSize([320, height]);
  app.canvas.ds.scale = 1;
  app.canvas.ds.offset = [200 - node.pos[0], 220 - node.pos[1]];
  app.canvas.setDirty(true, true);
}"""
HYBRID = {"mode": "manual", "devices": "cpu:8", "cfg_degree": 2, "ring_degree": 2, "ulysses_degree": 2}
# Picture -> the node, its inputs, its height, and the element to wait for.
PICTURES: dict[str, tuple[str, dict[str, Any], int, str]] = {
    "StrategySelectorPanel": (
        "StrategySelector",
        HYBRID,
        800,
        ".parallel-strategy:has-text('CFG 2 × Ring 2 × Ulysses 2') li.device",
    ),
    "StrategySelectorProblem": (
        "StrategySelector",
        {"mode": "manual", "devices": "cpu:8", "cfg_degree": 4},
        560,
        ".parallel-strategy [role=alert] p",
    ),
}

WORDS = """type => {
  const node = app.graph.nodes.find(n => n.type === type);
  const rows = node.widgets.filter(w => !w.hidden && w.type !== 'strategy_panel');
  return [node.title, ...rows.map(w => `${w.label ?? w.name}: ${w.value}`), node.widgets.find(
    w => w.name === 'strategy_panel').element.innerText].join('\\n');
}"""

STATUS, PROOF = (ROOT / "docs" / "images" / f"{name}.png" for name in ("status_panel", "prove_it"))
# Runs the workflow on two ranks with more steps than it has, so that there is time for a picture.
RUN = """async ([workflow, values]) => {
  await app.loadGraphData(workflow);
  for (const [type, wished] of Object.entries(values)) {
    for (const widget of app.graph.nodes.find(n => n.type === type).widgets) {
      if (widget.name in wished) widget.value = wished[widget.name];
    }
  }
  await app.extensionManager.command.execute('parallel_sampling.status_panel');
  await app.queuePrompt(0, 1);
}"""
TWO_RANKS = {
    "StrategySelector": {"mode": "manual", "devices": "cpu:2", "ulysses_degree": 2},
    "ParallelSampler": {"steps": 1000},
}
HALF_WAY = "() => /^step [1-9]\\d\\d of/.test(document.querySelector('.parallel-group .state')?.textContent)"


def show(page: Any, workflow: dict[str, Any], name: str) -> str:
    """Shows the node of a picture of PICTURES in the page; returns its words, with every number replaced by 7."""
    node, values, height, wanted = PICTURES[name]
    page.evaluate(ALONE, [workflow, node, values, height])
    page.wait_for_selector(wanted, timeout=20_000)
    return re.sub(r"[0-9][0-9.,]*", "7", page.evaluate(WORDS, node))


def photograph_status(page: Any, workflow: dict[str, Any]) -> None:
    """Photographs the status panel with two ranks at work."""
    page.evaluate(RUN, [workflow, TWO_RANKS])
    page.wait_for_function(HALF_WAY, timeout=120_000)
    page.locator(".parallel-status").screenshot(path=STATUS)
    page.evaluate("() => app.api.interrupt()")
    print(STATUS.name)


def photograph_proof(page: Any, workflow: dict[str, Any]) -> None:
    """Photographs the dialog of *Prove it* after a run of the workflow on two ranks."""
    page.evaluate(RUN, [workflow, TWO_RANKS | {"ParallelSampler": {"steps": 8}}])
    # An event instead of a click, because the button may lie anywhere on the canvas.
    page.get_by_role("button", name="Prove it").dispatch_event("click", timeout=120_000)
    page.locator("dialog figcaption").wait_for(timeout=120_000)
    page.wait_for_timeout(500)  # until both pictures are there
    page.locator("dialog").screenshot(path=PROOF)
    print(PROOF.name)


def main() -> None:
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        raise SetupError("playwright is not installed; install it and Chromium.") from None
    source = find_comfyui()
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if source is None or chromium is None:
        raise SetupError(
            "No ComfyUI or no Chromium was found; run ./scripts/test once, and install Chromium."
        )
    workflow = json.loads(WORKFLOW.read_text("utf-8"))
    with tempfile.TemporaryDirectory() as base, sync_playwright() as playwright:
        settings = Path(base) / "user" / "default" / "comfy.settings.json"
        settings.parent.mkdir(parents=True)
        settings.write_text('{"Comfy.TutorialCompleted": true}')
        packs = {"comfyui-parallel-sampling": ROOT}
        with ComfyUIServer(source, Path(base), packs, cpu=True) as server:
            browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
            page = browser.new_page(viewport={"width": 800, "height": 1200})
            page.goto(server.url)
            page.wait_for_function(READY, timeout=60_000)
            for name, (_, _, height, _) in PICTURES.items():
                words = show(page, workflow, name)
                page.wait_for_timeout(500)  # until the canvas is drawn
                clip = {"x": 190, "y": 185, "width": 340, "height": height + 40}
                drawn = Image.open(io.BytesIO(page.screenshot(clip=clip)))
                save(drawn, PAGES / f"{name}.png", words)
                print(f"{name}.png")
            page.set_viewport_size({"width": 1200, "height": 520})
            photograph_status(page, workflow)
            page.reload()
            page.wait_for_function(READY, timeout=60_000)
            page.set_viewport_size({"width": 1200, "height": 700})
            photograph_proof(page, workflow)
            browser.close()


if __name__ == "__main__":
    exit_on_setup_error(main)
