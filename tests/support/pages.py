"""ComfyUI's page in a browser: a prompt shown as a workflow of its own, and what is written on it."""

from __future__ import annotations

import json
from pathlib import Path

WEB = Path(__file__).resolve().parents[2] / "web"
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
    """Waits until the page that was opened or loaded anew has all of ours."""
    page.wait_for_function("() => window.app?.extensionManager && window.app?.graph", timeout=60_000)
    names = [f"parallel_sampling.{script.stem}" for script in WEB.glob("*.js")]
    page.wait_for_function(
        "names => names.every(name => app.extensions.some(e => e.name === name))", arg=names, timeout=60_000
    )


def show_prompt(page, prompt: dict, kind: str) -> None:
    """The prompt as a workflow with an id of its own, with the node of this kind in view."""
    page.evaluate(f"() => app.loadApiJson({json.dumps(prompt)}, 'shown')")
    page.wait_for_function("n => app.graph.nodes.length === n", arg=len(prompt))
    page.evaluate(
        """async (kind) => {
          const saved = app.graph.serialize();
          await app.loadGraphData({ ...saved, id: crypto.randomUUID() }, true, true, 'shown');
          const node = app.graph.nodes.find(n => n.type === kind);
          app.canvas.ds.scale = 1;
          app.canvas.ds.offset = [400 - node.pos[0], 100 - node.pos[1]];
          app.canvas.setDirty(true, true);
        }""",
        kind,
    )
    page.wait_for_function("kind => app.graph.nodes.some(n => n.type === kind)", arg=kind)
