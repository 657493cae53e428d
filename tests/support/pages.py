"""Drives ComfyUI's page in a browser: shows a prompt as a new workflow, and reads what is written on the page."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from comfy_harness import ROOT, Comfy
from graphs import STOCK, Graph

if TYPE_CHECKING:  # not every computer has it
    from playwright.sync_api import Locator, Page

# A message in the corner of the page, and its title: of PrimeVue, and since ComfyUI's frontend 1.58 of the page itself.
TOAST = ".p-toast-message, [data-testid=toast]"
TOAST_TITLE = ".p-toast-summary, [data-testid=toast] .font-medium"
REPORT = "() => document.querySelector('.parallel-report')?.textContent ?? ''"
_NODE = "app.graph.nodes.find(n => n.type === type)"
# Lists [text, x, y] of each text that the canvas writes in one full redraw: its middle, in pixels of the page.
WRITTEN = """() => {
  const { left, top, width } = app.canvas.canvas.getBoundingClientRect();
  const ratio = app.canvas.canvas.width / width;
  const written = [];
  const { fillText } = CanvasRenderingContext2D.prototype;
  CanvasRenderingContext2D.prototype.fillText = function (text, x, y, ...rest) {
    const at = this.getTransform().transformPoint({ x: x + this.measureText(text).width / 2, y });
    written.push([text, left + at.x / ratio, top + at.y / ratio]);
    return fillText.call(this, text, x, y, ...rest);
  };
  try { app.canvas.draw(true, true); } finally { CanvasRenderingContext2D.prototype.fillText = fillText; }
  return written;
}"""
_BADGES_OF_VUE = """() => [...document.querySelectorAll('.parallel-badge')].filter(
  badge => badge.checkVisibility()).map(badge => [badge.innerText])"""
# Gives pairs of overlapping nodes. A rectangle includes the title, which is above the node's position. If Vue draws
# the nodes, it is that of their elements.
OVERLAPS = """() => {
  const { scale } = app.canvas.ds;
  const drawn = [...document.querySelectorAll('.lg-node[data-node-id]')].map(e => [e.dataset.nodeId, e]);
  const boxes = drawn.length
    ? drawn.map(([id, e]) => [app.graph.getNodeById(id).title + id, e.getBoundingClientRect()])
    : app.graph.nodes.map(n => [n.title + n.id, new DOMRect(n.pos[0] * scale,
        (n.pos[1] - LiteGraph.NODE_TITLE_HEIGHT) * scale, n.size[0] * scale,
        (n.size[1] + LiteGraph.NODE_TITLE_HEIGHT) * scale)]);
  const found = [];
  for (const [one, p] of boxes) for (const [other, q] of boxes) {
    const across = Math.min(p.right, q.right) - Math.max(p.left, q.left);
    const down = Math.min(p.bottom, q.bottom) - Math.max(p.top, q.top);
    if (one < other && across > 1 && down > 1) found.push([one, other]);
  }
  return found;
}"""
# Lists [source class, slot, target class, input name] of each link, for each graph and subgraph.
LINKS = """() => [app.rootGraph ?? app.graph, ...(app.rootGraph ?? app.graph).subgraphs.values()].map(graph =>
  [...graph.links.values()].map(link => [
    graph.getNodeById(link.origin_id)?.type ?? 'outside', link.origin_slot,
    graph.getNodeById(link.target_id)?.type ?? 'outside',
    graph.getNodeById(link.target_id)?.inputs[link.target_slot].name ?? '']).sort())"""
SEND = "async () => (await app.graphToPrompt()).output"


def toast(page: Page, words: str) -> Locator:
    """Returns the message in the corner of the page that has these words; the page may also hold them for screen
    readers."""
    return page.locator(TOAST).filter(has_text=words)


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


def one_sampler(unet: str, devices: str = "cpu:2", sampler: dict | None = None, **choice) -> Graph:
    """Returns a graph of Parallel Sampler, its loader and Strategy Selector, which saves the latent. `sampler`: changed
    inputs of the sampler; `choice`: degrees and other inputs of the selector."""
    graph = Graph()
    loader = graph.parallel_loader(unet, devices, **choice)
    inputs = graph.request()
    graph.save(graph.parallel_sampler(loader, *inputs, **(sampler or {})), "of-the-page.safetensors")
    return graph


def template(name: str = "Try it without a download") -> dict:
    """Returns one of the pack's workflows."""
    return json.loads((ROOT / "example_workflows" / f"{name}.json").read_text("utf-8"))


def queued(comfy: Comfy) -> list[dict]:
    """Returns the nodes of each prompt that is running or waiting in ComfyUI's queue."""
    queue = comfy.ask("/queue", method="GET")[1]
    return [nodes for _, _, nodes, *_ in (*queue["queue_running"], *queue["queue_pending"])]


def ended(comfy: Comfy) -> list[dict]:
    """Returns the nodes of each prompt in ComfyUI's history, in the order of their ends."""
    return [run["prompt"][2] for run in comfy.ask("/history", method="GET")[1].values()]


def wait_for(page, read: str, wanted: object) -> None:
    """Waits until the JavaScript function `read` returns this value."""
    compared = f"wanted => JSON.stringify(({read})()) === JSON.stringify(wanted)"
    page.wait_for_function(compared, arg=wanted)


def send(page, event: str, detail: dict) -> None:
    """Gives the page an event of ours, as if ComfyUI had sent it."""
    page.evaluate(
        "([event, detail]) => app.api.dispatchCustomEvent(event, detail)",
        [f"parallel_sampling.{event}", detail],
    )


def refused_inputs(page) -> list[list[str]]:
    """Waits until ComfyUI refuses a prompt; returns the name of each refused input and what is said of it."""
    refused = """Object.values(app.lastNodeErrors ?? {}).flatMap(
      node => node.errors.map(error => [error.extra_info?.input_name, error.message]))"""
    page.wait_for_function(f"() => {refused}.length")
    return page.evaluate(f"() => {refused}")


def wait_for_badge(page, words: str, by_vue: bool = False, shown: bool = True) -> None:
    """Waits until the nodes' badges show words that match, a regular expression, or until none does."""
    badges = _BADGES_OF_VUE if by_vue else WRITTEN
    page.wait_for_function(
        f"""([words, shown]) => window.app?.canvas
          && ({badges})().some(([text]) => new RegExp(words).test(text)) === shown""",
        arg=[words, shown],
        polling=200,  # ms; it draws the whole canvas
    )


def wait_for_report(page, words: str) -> None:
    """Waits until the panel of the sampler shows a report, or a line in its place, that begins with these words."""
    page.wait_for_function(f"words => ({REPORT})().startsWith(words)", arg=words)


def three_samplers(unet: str, name: str, **options) -> Graph:
    """Returns a graph of two stock loaders and three KSamplers with seeds 0 to 2, which save `name`-0.safetensors and
    so on. The first loader feeds two of them, one through ModelSamplingFlux; the second feeds the last."""
    graph = Graph()
    model = graph.model(STOCK, unet)
    shifted = graph.add("ModelSamplingFlux", model=model, max_shift=1.0, base_shift=0.5, width=64, height=64)
    for seed, wire in enumerate((model, [shifted, 0], graph.model(STOCK, unet))):
        inputs = graph.request()
        graph.save(graph.ksampler(wire, *inputs, seed=seed, **options), f"{name}-{seed}.safetensors")
    return graph


def wait_for_extensions(page) -> None:
    """Waits until a page, after a load, has all extensions of the pack and shows its first workflow."""
    page.wait_for_function("() => window.app?.extensionManager?.workflow?.activeWorkflow")
    names = [f"parallel_sampling.{script.stem}" for script in (ROOT / "web").glob("*.js")]
    page.wait_for_function(
        "names => names.every(name => app.extensions.some(e => e.name === name))", arg=names
    )


def locale(language: str, name: str) -> dict:
    """Returns the texts in a file of a language, such as nodeDefs."""
    return json.loads((ROOT / "locales" / language / f"{name}.json").read_text("utf-8"))


def words_of(language: str = "en") -> dict[str, str]:
    """Returns the texts that the pack shows on the page."""
    return locale(language, "main")["parallel_sampling"]


def widgets(page, kind: str) -> dict[str, object]:
    """Returns the values of the widgets of a node of this kind that a workflow saves, by name."""
    values = f"{_NODE}.widgets.filter(w => w.serialize !== false).map(w => [w.name, w.value])"
    return page.evaluate(f"type => Object.fromEntries({values})", kind)


def set_widgets(page, kind: str, **values: object) -> None:
    """Sets widgets of a node of this kind as the page does: first the value, then the callback."""
    page.evaluate(
        f"""([type, values]) => {{
          for (const [name, value] of Object.entries(values)) {{
            const widget = {_NODE}.widgets.find(w => w.name === name);
            widget.value = value;
            widget.callback?.(value);
          }}
        }}""",
        [kind, values],
    )


def make_subgraph(page, nodes: str) -> None:
    """Puts the nodes that this JavaScript expression lists into a subgraph."""
    page.evaluate(f"() => {{ app.graph.convertToSubgraph(new Set({nodes})); }}")


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


def begin(page, name: str) -> None:
    """Executes a command of ours that may wait for a person's answer."""
    page.evaluate("name => void app.extensionManager.command.execute(name)", f"parallel_sampling.{name}")


def open_by(page, name: str, title: str, role: str = "dialog") -> Locator:
    """Executes a command of ours and returns the dialog, or the region of the page, that it opens."""
    begin(page, name)
    opened = page.get_by_role(role, name=title)
    opened.wait_for()
    return opened


def open_picker(page):
    """Opens Strategy Selector's list of devices by keyboard and returns it."""
    page.locator(".parallel-devices summary").focus()
    page.keyboard.press("Enter")
    picker = page.locator(".parallel-devices fieldset")
    picker.locator("input").first.wait_for()
    return picker


def run(page) -> None:
    page.evaluate("() => app.queuePrompt(0, 1)")


def bring_into_view(page, kind: str) -> None:
    """Scrolls the canvas to the node of this kind, at its full size."""
    page.evaluate(
        f"""type => {{
          const node = {_NODE};
          app.canvas.ds.scale = 1;
          app.canvas.ds.offset = [400 - node.pos[0], 100 - node.pos[1]];
          app.canvas.setDirty(true, true);
        }}""",
        kind,
    )


def show_prompt(page, prompt: dict, kind: str = "") -> None:
    """Shows the prompt as a workflow with a new id. `kind`: brings the node of this kind into view, if given."""
    page.evaluate(f"() => app.loadApiJson({json.dumps(prompt)}, 'shown')")
    page.wait_for_function("n => app.graph.nodes.length === n", arg=len(prompt))
    page.evaluate(
        """async () => {
          const saved = app.graph.serialize();
          await app.loadGraphData({ ...saved, id: crypto.randomUUID() }, true, true, 'shown');
        }"""
    )
    if kind:
        bring_into_view(page, kind)


def show_again(page) -> None:
    """Shows an empty workflow and then this one again, whose runs the page takes from ComfyUI's history."""
    page.evaluate(
        """async () => {
          const saved = app.graph.serialize();
          const empty = { nodes: [], links: [], version: 0.4, id: crypto.randomUUID() };
          for (const one of [empty, saved]) await app.loadGraphData(one, true, true, 'again');
        }"""
    )
