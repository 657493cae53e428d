"""Draws docs/images/icon.png and banner.png: one picture, computed in four parts that fit without a seam."""

from __future__ import annotations

import math
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from drawn_from import digest, save

IMAGES = Path(__file__).resolve().parent.parent / "docs" / "images"
SOURCES = [Path(__file__)]
ICON = 400  # pixels; the registry takes up to 800 x 400
BANNER = (1260, 540)  # 21:9

_SMOOTH = 3
_PAPER, _TEXT, _FAINT = "#191b20", "#ffffff", "#8fb8e8"
# One colour for each device.
_DEVICES = ("#7fd67f", "#5fbfd0", "#ffa931", "#ff9cf9")


def mark(side: int) -> Image.Image:
    """Returns [side, side] RGB: a sun over hills in four slightly separated quarters, each in its device's colour."""
    large = side * _SMOOTH
    picture = Image.new("RGB", (large, large), _PAPER)
    draw = ImageDraw.Draw(picture)
    gap, edge = large // 28, large // 12
    inner = (large - 2 * edge - gap) // 2
    for place, colour in enumerate(_DEVICES):
        left, top = edge + place % 2 * (inner + gap), edge + place // 2 * (inner + gap)
        quarter = landscape(2 * inner, colour).crop(
            (place % 2 * inner, place // 2 * inner, place % 2 * inner + inner, place // 2 * inner + inner)
        )
        rounded = Image.new("L", quarter.size, 0)
        ImageDraw.Draw(rounded).rounded_rectangle((0, 0, inner - 1, inner - 1), inner // 9, 255)
        picture.paste(quarter, (left, top), rounded)
        draw.rounded_rectangle(
            (left, top, left + inner, top + inner), inner // 9, outline=colour, width=large // 90
        )
    return picture.resize((side, side), Image.LANCZOS)


def landscape(side: int, colour: str) -> Image.Image:
    """Returns the whole picture in shades of one device's colour."""
    paper, tint = Image.new("RGB", (side, side), _PAPER), Image.new("RGB", (side, side), colour)

    def shade(share: float) -> tuple[int, int, int]:
        return Image.blend(paper, tint, share).getpixel((0, 0))

    picture = Image.new("RGB", (side, side), shade(0.22))
    draw = ImageDraw.Draw(picture)
    draw.circle((side * 0.5, side * 0.42), side * 0.24, shade(0.95))
    for height, swing, phase, share in ((0.62, 0.07, 0.4, 0.5), (0.76, 0.06, 2.6, 0.72)):
        ridge = [
            (x, side * (height + swing * math.sin(phase + 2 * math.pi * x / side)))
            for x in range(0, side + 1, max(1, side // 200))
        ]
        draw.polygon([*ridge, (side, side), (0, side)], shade(share))
    return picture


def banner() -> Image.Image:
    """Returns [540, 1260] RGB: the mark, the name and what the pack does."""
    height = BANNER[1]
    picture = Image.new("RGB", BANNER, _PAPER)
    picture.paste(mark(height - 120), (60, 60))
    draw = ImageDraw.Draw(picture)
    left = height + 10
    draw.text((left, 190), "Parallel Sampling", _TEXT, ImageFont.load_default(72), "lm")
    draw.text((left, 275), "for ComfyUI", _TEXT, ImageFont.load_default(40), "lm")
    draw.text((left, 350), "one Flux image, all your GPUs", _FAINT, ImageFont.load_default(40), "lm")
    return picture


def main() -> None:
    """Writes icon.png and banner.png."""
    save(mark(ICON), IMAGES / "icon.png", digest(SOURCES))
    save(banner(), IMAGES / "banner.png", digest(SOURCES))
    print(f"icon.png and banner.png in {IMAGES.name}")


if __name__ == "__main__":
    main()
