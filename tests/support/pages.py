"""Drives ComfyUI's page in a browser: shows a prompt as a new workflow, and reads what is written on the page."""

from __future__ import annotations

import json
import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
REPORT = "() => document.querySelector('.parallel-report')?.textContent ?? ''"
_NODE = "app.graph.nodes.find(n => n.type === type)"
# Returns the texts that the canvas writes in one full redraw, or the texts of the badges if Vue draws the nodes.
BADGES = """(byVue) => {
  if (!window.app?.canvas) return ''; // while the page loads
  const ofVue = [...document.querySelectorAll('.parallel-badge')].filter(badge => badge.checkVisibility());
  if (byVue) return ofVue.map(badge => badge.innerText).join();
  const written = [];
  const fillText = CanvasRenderingContext2D.prototype.fillText;
  CanvasRenderingContext2D.prototype.fillText = function (text, ...rest) {
    written.push(text);
    return fillText.call(this, text, ...rest);
  };
  try { app.canvas.draw(true, true); } finally { CanvasRenderingContext2D.prototype.fillText = fillText; }
  return written.join('\\n');
}"""


def _gpu(index: int, **changes) -> dict:
    memory = {"total_bytes": 80 * 2**30, "free_bytes": 70 * 2**30}
    return {"device": f"cuda:{index}", "name": "NVIDIA H100", **memory, "users": [], "busy": False} | changes


# An answer of the route that lists devices, without the devices that the text selects.
EIGHT_GPUS = {
    "devices": [
        _gpu(0, users=["processes of this ComfyUI: sampling 3/28"], busy=True),
        _gpu(1, users=["blender (process 77): 9.50 GiB"]),
        *map(_gpu, range(2, 8)),
    ],
    "clusters": [{"devices": "cluster:den", "words": "16 devices on 2 machines, 1280.0 GiB", "there": True}],
    "machine": "8 × NVIDIA H100 (80 GiB), slowest path NVSWITCH.",
}


def wait_for_extensions(page) -> None:
    """Waits until a page, after a load, has all extensions of the pack and shows its first workflow."""
    page.wait_for_function("() => window.app?.extensionManager?.workflow?.activeWorkflow", timeout=60_000)
    names = [f"parallel_sampling.{script.stem}" for script in (ROOT / "web").glob("*.js")]
    page.wait_for_function(
        "names => names.every(name => app.extensions.some(e => e.name === name))", arg=names, timeout=60_000
    )


def locale(language: str, name: str) -> dict:
    """Returns the texts in a file of a language, such as nodeDefs."""
    return json.loads((ROOT / "locales" / language / f"{name}.json").read_text("utf-8"))


def words_of(language: str = "en") -> dict[str, str]:
    """Returns the texts that the pack shows on the page."""
    return locale(language, "main")["parallel_sampling"]


def set_widget(page, kind: str, name: str, value: object) -> None:
    """Sets a widget of a node of this kind as the page does: first the value, then the callback."""
    page.evaluate(
        f"""([type, name, value]) => {{
          const widget = {_NODE}.widgets.find(w => w.name === name);
          widget.value = value;
          widget.callback?.(value);
        }}""",
        [kind, name, value],
    )


def menu_of(page, kind: str) -> list[str]:
    """Returns the entries in the menu of a node of this kind."""
    items = f"app.canvas.getNodeMenuOptions({_NODE}).map(item => item?.content).filter(Boolean)"
    return page.evaluate(f"(type) => {items}", kind)


def choose(page, kind: str, entry: str) -> None:
    """Chooses an entry from the menu of a node of this kind."""
    found = f"app.canvas.getNodeMenuOptions({_NODE}).find(item => item?.content === entry)"
    page.evaluate(f"([type, entry]) => {found}.callback()", [kind, entry])


def command(page, name: str) -> None:
    page.evaluate("name => app.extensionManager.command.execute(name)", name)


def open_picker(page):
    """Opens Strategy Selector's list of devices by keyboard and returns it."""
    page.locator(".parallel-devices summary").focus()
    page.keyboard.press("Enter")
    picker = page.locator(".parallel-devices fieldset")
    picker.locator("input").first.wait_for(timeout=20_000)
    return picker


def run(page) -> None:
    page.evaluate("() => app.queuePrompt(0, 1)")


def shoot(page, name: str) -> None:
    """Saves a screenshot of the page, if PARALLEL_SAMPLING_SCREENSHOTS names a folder."""
    if folder := os.environ.get("PARALLEL_SAMPLING_SCREENSHOTS"):
        page.screenshot(path=Path(folder) / f"{name}.png")


def show_prompt(page, prompt: dict, kind: str = "") -> None:
    """Shows the prompt as a workflow with a new id. `kind`: brings the node of this kind into view, if given."""
    page.evaluate(f"() => app.loadApiJson({json.dumps(prompt)}, 'shown')")
    page.wait_for_function("n => app.graph.nodes.length === n", arg=len(prompt))
    page.evaluate(
        """async (kind) => {
          const saved = app.graph.serialize();
          await app.loadGraphData({ ...saved, id: crypto.randomUUID() }, true, true, 'shown');
          const node = app.graph.nodes.find(n => n.type === kind);
          if (!node) return;
          app.canvas.ds.scale = 1;
          app.canvas.ds.offset = [400 - node.pos[0], 100 - node.pos[1]];
          app.canvas.setDirty(true, true);
        }""",
        kind,
    )
