"""Draws docs/images/overview.png, the README's picture: one sampling job on its way through four devices and back."""

from __future__ import annotations

from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from draw_brand import _DEVICES, _FAINT, _PAPER, _TEXT, IMAGES, mark
from drawn_from import digest, save

SIZE = (1400, 520)
SOURCES = [Path(__file__).parent / name for name in ("draw_overview.py", "draw_brand.py")]
_EDGE = "#4a5160"
_PANEL = "#23262d"
_STOCK = (
    "Prompts, LoRAs, ControlNets",
    "Noise and sigmas",
    "Parallel Sampler, or your KSampler",
    "VAE, previews, cancel",
)
_SAID = (
    "one process per GPU, warm between prompts",
    "one copy of the weights in host memory",
    "every GPU computes its part of every step",
)


def overview() -> Image.Image:
    """Returns [520, 1400] RGB: the graph, the ranks with a quarter of the picture each, and the latent they return."""
    picture = Image.new("RGB", SIZE, _PAPER)
    draw = ImageDraw.Draw(picture)
    _title(draw, 60, "Your ComfyUI graph", "stays as it is")
    for row, text in enumerate(_STOCK):
        _box(draw, (60, 130 + row * 80, 400, 190 + row * 80), text, _EDGE)
    _arrow(draw, (410, 320), (500, 320), "one job")
    _title(draw, 520, "The processes", "Ulysses, Ring, CFG, PipeFusion, …")
    whole = mark(380)
    half = whole.width // 2
    for number, colour in enumerate(_DEVICES):
        left, top = 520 + number % 2 * 210, 120 + number // 2 * 190
        quarter = whole.crop(
            (number % 2 * half, number // 2 * half, number % 2 * half + half, number // 2 * half + half)
        )
        picture.paste(quarter.resize((150, 150)), (left + 25, top))
        draw.text((left + 100, top + 151), f"GPU {number}", colour, ImageFont.load_default(20), "mt")
    draw.line((705, 195, 755, 195), _FAINT, 3)
    draw.line((705, 385, 755, 385), _FAINT, 3)
    _arrow(draw, (950, 320), (1040, 320), "one latent")
    _title(draw, 1060, "The image", "the same as from one GPU")
    picture.paste(whole.resize((280, 280)), (1060, 130))
    for row, text in enumerate(_SAID):
        draw.text((1060, 424 + row * 26), text, _FAINT, ImageFont.load_default(15), "lm")
    return picture


def _title(draw: ImageDraw.ImageDraw, left: int, text: str, below: str) -> None:
    draw.text((left, 50), text, _TEXT, ImageFont.load_default(30), "lm")
    draw.text((left, 88), below, _FAINT, ImageFont.load_default(20), "lm")


def _box(draw: ImageDraw.ImageDraw, area: tuple[int, int, int, int], text: str, edge: str) -> None:
    draw.rounded_rectangle(area, 10, _PANEL, edge, 2)
    middle = ((area[0] + area[2]) / 2, (area[1] + area[3]) / 2)
    draw.text(middle, text, _TEXT, ImageFont.load_default(18), "mm")


def _arrow(draw: ImageDraw.ImageDraw, start: tuple[int, int], end: tuple[int, int], text: str) -> None:
    draw.line((*start, *end), _TEXT, 4)
    draw.polygon([end, (end[0] - 14, end[1] - 9), (end[0] - 14, end[1] + 9)], _TEXT)
    draw.text(((start[0] + end[0]) / 2, start[1] - 16), text, _TEXT, ImageFont.load_default(18), "mb")


if __name__ == "__main__":
    save(overview(), IMAGES / "overview.png", digest(SOURCES))
    print(f"overview.png in {IMAGES.name}")
