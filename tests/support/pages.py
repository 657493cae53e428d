"""ComfyUI's page in a browser: a prompt shown as a workflow of its own, and what is written on it."""

from __future__ import annotations

import json
import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
REPORT = "() => document.querySelector('.parallel-report')?.textContent ?? ''"
_NODE = "app.graph.nodes.find(n => n.type === type)"
# What the canvas writes while it draws all of it once; of nodes that Vue draws, the text of their badges.
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


def wait_for_extensions(page) -> None:
    """Waits until the page that was opened or loaded anew has all of ours, and shows the workflow it began with."""
    page.wait_for_function("() => window.app?.extensionManager?.workflow?.activeWorkflow", timeout=60_000)
    names = [f"parallel_sampling.{script.stem}" for script in (ROOT / "web").glob("*.js")]
    page.wait_for_function(
        "names => names.every(name => app.extensions.some(e => e.name === name))", arg=names, timeout=60_000
    )


def locale(language: str, name: str) -> dict:
    """The texts of that file of a language, such as nodeDefs."""
    return json.loads((ROOT / "locales" / language / f"{name}.json").read_text("utf-8"))


def words_of(language: str = "en") -> dict[str, str]:
    """What the pack says on the page."""
    return locale(language, "main")["parallel_sampling"]


def set_widget(page, kind: str, name: str, value: object) -> None:
    """As widgets do it: the value of a node of this kind, then who waits for it."""
    page.evaluate(
        f"""([type, name, value]) => {{
          const widget = {_NODE}.widgets.find(w => w.name === name);
          widget.value = value;
          widget.callback?.(value);
        }}""",
        [kind, name, value],
    )


def menu_of(page, kind: str) -> list[str]:
    """The entries in the menu of a node of this kind."""
    items = f"app.canvas.getNodeMenuOptions({_NODE}).map(item => item?.content).filter(Boolean)"
    return page.evaluate(f"(type) => {items}", kind)


def choose(page, kind: str, entry: str) -> None:
    """Chooses from the menu of a node of this kind."""
    found = f"app.canvas.getNodeMenuOptions({_NODE}).find(item => item?.content === entry)"
    page.evaluate(f"([type, entry]) => {found}.callback()", [kind, entry])


def command(page, name: str) -> None:
    page.evaluate("name => app.extensionManager.command.execute(name)", name)


def run(page) -> None:
    page.evaluate("() => app.queuePrompt(0, 1)")


def shoot(page, name: str) -> None:
    """Keeps a picture of the page where people look at them, if that is asked for."""
    if folder := os.environ.get("PARALLEL_SAMPLING_SCREENSHOTS"):
        page.screenshot(path=Path(folder) / f"{name}.png")


def show_prompt(page, prompt: dict, kind: str = "") -> None:
    """The prompt as a workflow with an id of its own, with the node of this kind in view, if one is named."""
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
