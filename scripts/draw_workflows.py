"""Draws the pictures of the example workflows and of the nodes' help pages from the saved graphs themselves.

``python scripts/draw_workflows.py`` asks a real ComfyUI for the names of the widgets, makes it run the template of the
demo model, and writes ``example_workflows/*.jpg`` and the pictures in ``web/docs``. The other templates' models are too
large to run here, so their pictures show what the devices do.
"""

from __future__ import annotations

import io
import json
import re
import tempfile
import textwrap
from pathlib import Path
from typing import Any, NamedTuple

from PIL import Image, ImageDraw, ImageFont

from comfyui_client import ComfyUIClient
from comfyui_server import ComfyUIServer
from comfyui_source import find_comfyui
from draw_shares import draw_shares
from drawn_from import digest, save
from steps import SetupError, exit_on_setup_error
from workflow_to_api import widgets, workflow_to_api

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "example_workflows"

SIDE = 768  # pixels of a thumbnail
HELP_SCALE = 0.75
# Pictures by the demo model (scripts/train_demo_model.py).
DEMO_PICTURES = ROOT / "docs" / "images" / "demo_contact_sheet.jpg"
DEMO = "Try it without a download"
# The motifs of the other templates (draw_shares.py). Templates that are not listed show one picture on all devices.
MOTIFS = {
    "Flux.1 dev from a picture": "from a picture",
    "Flux.1 dev inpainting": "mask",
    "Flux.1 dev larger than a card": "weights",
    "Flux.1 dev with LoRAs": "LoRAs",
    "Flux.1 dev with a ControlNet": "outlines",
    "Flux.1 dev with a negative prompt": "prompts",
    "HunyuanVideo 1.5 text to video on all GPUs": "film",
    "LTX-2 text to video on all GPUs": "film",
    "MiniMax-H3 text to video on all GPUs": "film",
    "Qwen-Image-Edit on all GPUs": "from a picture",
    "SDXL on all GPUs": "prompts",
    "Wan 2.2 text to video on all GPUs": "film",
}
# Help page -> the workflow and the nodes that its picture shows.
HELP = {
    "ParallelModel": ("Wan 2.2 text to video on all GPUs", ("UNETLoader", "ParallelModel")),
    "StrategySelector": (
        "Flux.1 dev larger than a card",
        ("StrategySelector", "ParallelFluxLoader", "PreviewAny"),
    ),
    "ParallelFluxLoader": ("Flux.1 dev on all GPUs", ("ParallelFluxLoader",)),
    "ParallelLoraLoader": ("Flux.1 dev with LoRAs", ("ParallelLoraLoader",)),
    "ParallelSampler": ("Flux.1 dev on all GPUs", ("ParallelSampler",)),
    "ParallelVAEDecode": ("Flux.1 dev at high resolution", ("ParallelVAEDecode",)),
}

_SIZED = re.compile("Empty.*Latent.*|MiniMaxH3ImageToVideo")  # nodes whose first widgets are width and height

# LiteGraph's measures, in the graph's units.
_TITLE, _SLOT, _WIDGET = 30, 20, 24
_SMOOTH = 2  # pictures are drawn this much larger, then scaled down

_PAPER, _NODE, _HEAD, _FIELD, _TEXT, _FAINT = "#191b20", "#353535", "#2b2b2b", "#222222", "#dddddd", "#999999"
_GROUP = "#1f2c38"
_LINKS = {
    "PARALLEL_STRATEGY": "#7fd67f",
    "PARALLEL_MODEL": "#5fbfd0",
    "MODEL": "#b39ddb",
    "CONDITIONING": "#ffa931",
    "LATENT": "#ff9cf9",
    "IMAGE": "#64b5f6",
    "MASK": "#81c784",
    "VAE": "#ff6e6e",
    "CLIP": "#ffd500",
}


class Box(NamedTuple):
    """A rectangle in the graph's units."""

    left: float
    top: float
    right: float
    bottom: float


class Sheet:
    """A picture of the part of a graph that lies in a box."""

    def __init__(self, box: Box, scale: float) -> None:
        self._box, self._scale = box, scale * _SMOOTH
        size = (box.right - box.left) * self._scale, (box.bottom - box.top) * self._scale
        self._image = Image.new("RGB", (round(size[0]), round(size[1])), _PAPER)
        self._draw = ImageDraw.Draw(self._image)
        self._fonts: dict[float, Any] = {}

    def picture(self) -> Image.Image:
        """Returns [H, W] RGB, scaled down so that edges are smooth."""
        return self._image.resize([side // _SMOOTH for side in self._image.size], Image.LANCZOS)

    def at(self, x: float, y: float) -> tuple[float, float]:
        """Returns a point of the graph in pixels."""
        return (x - self._box.left) * self._scale, (y - self._box.top) * self._scale

    def rectangle(self, x: float, y: float, width: float, height: float, fill: str, radius: float) -> None:
        corners = [*self.at(x, y), *self.at(x + width, y + height)]
        self._draw.rounded_rectangle(corners, radius * self._scale, fill)

    def dot(self, x: float, y: float, fill: str) -> None:
        self._draw.circle(self.at(x, y), 5 * self._scale, fill)

    def text(
        self, x: float, y: float, text: str, fill: str, size: float, anchor: str, width: float = 1e9
    ) -> None:
        """Draws a text. ``anchor``: Pillow's; ``width``: a wider text is cut, in the graph's units."""
        text = text.replace("×", "x").replace("–", "-")  # Pillow's font lacks these characters
        font = self._fonts.setdefault(size, ImageFont.load_default(size * self._scale))
        while text and font.getlength(text) > width * self._scale:
            text = text[:-2].rstrip("…") + "…" if len(text) > 2 else ""
        self._draw.text(self.at(x, y), text, fill, font, anchor)

    def link(self, start: tuple[float, float], end: tuple[float, float], fill: str) -> None:
        """Draws a cubic curve that leaves and arrives horizontally."""
        reach = max(40.0, abs(end[0] - start[0]) / 2)
        points = []
        for step in range(33):
            t = step / 32
            a, b, c, d = (1 - t) ** 3, 3 * t * (1 - t) ** 2, 3 * t * t * (1 - t), t**3
            x = a * start[0] + b * (start[0] + reach) + c * (end[0] - reach) + d * end[0]
            points.append(self.at(x, a * start[1] + b * start[1] + c * end[1] + d * end[1]))
        self._draw.line(points, fill, max(1, round(2.5 * self._scale)), "curve")


def outline(node: dict[str, Any]) -> Box:
    """Returns the box of a node with its title."""
    (x, y), (width, height) = node["pos"], node["size"]
    return Box(x, y - _TITLE, x + width, y + height)


def around(nodes: list[dict[str, Any]], margin: float) -> Box:
    """Returns the smallest box around the nodes, plus a margin."""
    boxes = [outline(node) for node in nodes]
    return Box(
        min(box.left for box in boxes) - margin,
        min(box.top for box in boxes) - margin,
        max(box.right for box in boxes) + margin,
        max(box.bottom for box in boxes) + margin,
    )


def draw_graph(workflow: dict[str, Any], object_info: dict[str, Any], box: Box, scale: float) -> Image.Image:
    """Draws the part of a saved workflow that lies in ``box``, with ``scale`` pixels for each of the graph's units."""
    sheet = Sheet(box, scale)
    for group in workflow["groups"]:
        x, y, width, height = group["bounding"]
        sheet.rectangle(x, y, width, height, _GROUP, 6)
        sheet.text(x + 12, y + 10, group["title"], _TEXT, 24, "la", width - 24)
    nodes = {node["id"]: node for node in workflow["nodes"]}
    for _, source, out, target, into, kind in workflow["links"]:
        start, end = nodes[source], nodes[target]
        sheet.link(
            (start["pos"][0] + start["size"][0], _slot_height(start, out)),
            (end["pos"][0], _slot_height(end, into)),
            _LINKS.get(kind, _FAINT),
        )
    for node in nodes.values():  # over the links, as on ComfyUI's canvas
        _draw_node(sheet, node, object_info)
    return sheet.picture()


def _slot_height(node: dict[str, Any], place: int) -> float:
    return node["pos"][1] + _SLOT * (place + 0.7)


def _draw_node(sheet: Sheet, node: dict[str, Any], object_info: dict[str, Any]) -> None:
    (x, y), (width, height) = node["pos"], node["size"]
    info = object_info.get(node["type"])
    title = node.get("title") or (info and info.get("display_name")) or node["type"]
    sheet.rectangle(x, y - _TITLE, width, height + _TITLE, node.get("bgcolor", _NODE), 8)
    sheet.rectangle(x, y - _TITLE, width, _TITLE, node.get("color", _HEAD), 8)
    sheet.text(x + 12, y - _TITLE / 2, title, _TEXT, 15, "lm", width - 24)
    if info is None:
        _draw_note(sheet, node)
        return
    for place, slot in enumerate(node["inputs"]):
        sheet.dot(x, _slot_height(node, place), _LINKS.get(slot["type"], _FAINT))
        sheet.text(x + 12, _slot_height(node, place), slot["name"], _TEXT, 13, "lm")
    for place, slot in enumerate(node["outputs"]):
        sheet.dot(x + width, _slot_height(node, place), _LINKS.get(slot["type"], _FAINT))
        sheet.text(x + width - 12, _slot_height(node, place), slot["name"], _TEXT, 13, "rm")
    top = y + 8 + _SLOT * max(len(node["inputs"]), len(node["outputs"]))
    for name, value, long in _shown(node, info):
        if top + _WIDGET - 4 > y + height:
            break
        tall = y + height - top - 8 if long else _WIDGET - 4
        sheet.rectangle(x + 10, top, width - 20, tall, _FIELD, 4 if long else 10)
        if long:
            _draw_lines(sheet, x + 18, top + 8, width - 36, tall - 8, str(value), 13)
        else:
            sheet.text(x + 20, top + tall / 2, name, _FAINT, 12, "lm")
            sheet.text(x + width - 20, top + tall / 2, str(value), _TEXT, 12, "rm", width * 0.55)
        top += _WIDGET


def _shown(node: dict[str, Any], info: dict[str, Any]) -> list[tuple[str, Any, bool]]:
    """Returns (name, saved value, True if it is a text field) for each widget."""
    saved = list(node["widgets_values"])
    shown = []
    for name, _, options in widgets(info):
        if not saved:
            break
        shown.append((name, saved.pop(0), bool(options.get("multiline"))))
        if options.get("control_after_generate"):
            shown.append(("control after generate", saved.pop(0), False))
    return shown


def _draw_note(sheet: Sheet, node: dict[str, Any]) -> None:
    (x, y), (width, height) = node["pos"], node["size"]
    text = re.sub(r"\[([^]]+)\]\([^)]+\)", r"\1", node["widgets_values"][0])  # links by their words
    text = text.replace("**", "").replace("`", "").replace("*", "")
    _draw_lines(sheet, x + 14, y + 14, width - 28, height - 28, text, 15)


def _draw_lines(
    sheet: Sheet, x: float, y: float, width: float, height: float, text: str, size: float
) -> None:
    """Draws a text in lines of about ``width``; a heading is larger."""
    top = y
    for paragraph in text.split("\n"):
        large = paragraph.startswith("#")
        letters = size * (1.4 if large else 1.0)
        line = ""
        for word in [*paragraph.lstrip("# ").split(), None]:
            if word is None or len(line) + len(word) > width / (letters * 0.5):
                if top + letters * 1.3 > y + height:
                    return
                sheet.text(x, top, line, _TEXT, letters, "la", width)
                top += letters * 1.3
                line = ""
            line += f"{word} "


def thumbnail(
    name: str, workflow: dict[str, Any], object_info: dict[str, Any], result: Image.Image | None = None
) -> Image.Image:
    """Draws [SIDE, SIDE]: the name, the `result` or else what the devices do for it, and the whole graph."""
    sheet = Sheet(Box(0, 0, SIDE, SIDE), 1)
    lines = textwrap.wrap(name, 26)
    for row, line in enumerate(lines):
        sheet.text(36, 32 + row * 56, line, "#ffffff", 50, "la", SIDE - 64)
    picture = sheet.picture()
    top = 40 + 56 * len(lines)
    room = SIDE - 72, SIDE - 200 - top
    if result is not None:
        shown = result.resize((room[1], room[1]), Image.LANCZOS)
    else:
        shown = draw_shares(MOTIFS.get(name, "picture"), room, _ratio(workflow))
    picture.paste(shown, ((SIDE - shown.width) // 2, top))
    whole = around(workflow["nodes"], 70)
    scale = min((SIDE - 48) / (whole.right - whole.left), 180 / (whole.bottom - whole.top))
    graph = draw_graph(workflow, object_info, whole, scale)
    picture.paste(graph, ((SIDE - graph.width) // 2, SIDE - 190))
    return picture


def _ratio(workflow: dict[str, Any]) -> float:
    """Returns the picture's width over its height as a node of the graph sets them, or 1 without such a node."""
    sized = next((n for n in workflow["nodes"] if _SIZED.fullmatch(n["type"])), None)
    sides = [value for value in sized["widgets_values"] if isinstance(value, int)] if sized else [1, 1]
    return sides[0] / sides[1]


def _demo_pictures(width: int) -> Image.Image:
    sheet = Image.open(DEMO_PICTURES)
    return sheet.resize((width, round(sheet.height * width / sheet.width)), Image.LANCZOS)


def help_picture(page: str, workflow: dict[str, Any], object_info: dict[str, Any]) -> Image.Image:
    """Draws the nodes of a help page with the ends of their links."""
    kinds = HELP[page][1]
    nodes = [
        node for node in workflow["nodes"] if node["type"] in kinds and node.get("title", "")[:6] != "Report"
    ]
    return draw_graph(workflow, object_info, around(nodes, 60), HELP_SCALE)


def demo_result(client: ComfyUIClient, workflow: dict[str, Any], object_info: dict[str, Any]) -> Image.Image:
    """Returns the picture that the template of the demo model gives."""
    entry = client.run(workflow_to_api(workflow, object_info))
    images = next(shown["images"] for shown in entry["outputs"].values() if "images" in shown)
    return Image.open(io.BytesIO(client.view(images[0]))).convert("RGB")


def sources(workflow: str) -> list[Path]:
    """Returns the files on which the picture of a workflow depends."""
    scripts = ("draw_workflows.py", "draw_shares.py", "draw_brand.py")
    return [EXAMPLES / f"{workflow}.json", *(ROOT / "scripts" / script for script in scripts)]


def main() -> None:
    """Draws all pictures. Raises SetupError if there is no ComfyUI."""
    comfyui = find_comfyui()
    if comfyui is None:
        raise SetupError("no ComfyUI found: run ./scripts/test once, or set COMFYUI_PATH")
    workflows = {path.stem: json.loads(path.read_text("utf-8")) for path in sorted(EXAMPLES.glob("*.json"))}
    with tempfile.TemporaryDirectory() as folder:
        packs = {"comfyui-parallel-sampling": ROOT}
        with ComfyUIServer(comfyui, Path(folder), packs, cpu=True) as server:
            client = ComfyUIClient(server.url)
            object_info = client.object_info()
            result = demo_result(client, workflows[DEMO], object_info)
    for name, workflow in workflows.items():
        drawn = thumbnail(name, workflow, object_info, result if name == DEMO else None)
        save(drawn, EXAMPLES / f"{name}.jpg", digest(sources(name)))
    for page, (name, _) in HELP.items():
        drawn = help_picture(page, workflows[name], object_info).quantize(256)
        save(drawn, ROOT / "web" / "docs" / f"{page}.png", digest(sources(name)))
    _demo_pictures(480).save(ROOT / "web" / "docs" / "ParallelDemoLoader.jpg", quality=85, optimize=True)
    print(f"{len(workflows)} workflows and {len(HELP) + 1} help pages drawn")


if __name__ == "__main__":
    exit_on_setup_error(main)
