"""Drawings of what a template does: which device computes which part of its picture. They imitate no model's output."""

from __future__ import annotations

from collections.abc import Callable

from PIL import Image, ImageDraw, ImageFilter, ImageFont

from draw_brand import _DEVICES, _FAINT, _PAPER, landscape

_SMOOTH = 2  # pictures are drawn this much larger, then scaled down
_GREY = "#8a8f98"
_COUNT = len(_DEVICES)


def draw_shares(kind: str, size: tuple[int, int], ratio: float) -> Image.Image:
    """Draws a motif of MOTIFS, [size] RGB; its picture is `ratio` times as wide as high. Raises KeyError for others."""
    sheet = Image.new("RGB", (size[0] * _SMOOTH, size[1] * _SMOOTH), _PAPER)
    MOTIFS[kind](sheet, ratio)
    return sheet.resize(size, Image.LANCZOS)


def _bands(size: tuple[int, int], devices: range, *, labels: bool = True) -> Image.Image:
    """Returns a picture cut into slightly separated bands, one for each of these devices in its colour."""
    width, height = size
    gap = height // 40 if len(devices) > 1 else 0
    picture = Image.new("RGB", size, _PAPER)
    draw = ImageDraw.Draw(picture)
    for row, device in enumerate(devices):
        whole = landscape(height, _DEVICES[device]).resize(size)
        top, bottom = row * height // len(devices), (row + 1) * height // len(devices) - gap
        picture.paste(whole.crop((0, top, width, bottom)), (0, top))
        if labels:
            font = ImageFont.load_default(height // 14)
            draw.text((width - height // 30, (top + bottom) // 2), f"GPU {device}", "#ffffff", font, "rm")
    return picture


def _fitted(width: float, height: float, ratio: float) -> tuple[int, int]:
    """Returns the largest size of that ratio within these sides."""
    return (int(width), int(width / ratio)) if width / ratio <= height else (int(height * ratio), int(height))


def _centred(sheet: Image.Image, picture: Image.Image, x: float, y: float = 0.5) -> None:
    """Pastes the picture with its middle at these shares of the sheet's sides."""
    left, top = sheet.width * x - picture.width / 2, sheet.height * y - picture.height / 2
    sheet.paste(picture, (round(left), round(top)))


def _label(sheet: Image.Image, text: str, x: float, y: float) -> None:
    font = ImageFont.load_default(sheet.height // 14)
    ImageDraw.Draw(sheet).text((sheet.width * x, sheet.height * y), text, _FAINT, font, "mm")


def _arrow(sheet: Image.Image, x: float, y: float) -> None:
    side = sheet.height / 24
    left, top = sheet.width * x, sheet.height * y
    ImageDraw.Draw(sheet).polygon(
        [(left - side, top - side), (left + side, top), (left - side, top + side)], _FAINT
    )


def _picture(sheet: Image.Image, ratio: float) -> None:
    """Draws one picture, a share of it on each device."""
    _centred(sheet, _bands(_fitted(sheet.width, sheet.height, ratio), range(_COUNT)), 0.5)


def _prompts(sheet: Image.Image, ratio: float) -> None:
    """Draws the prompt on one half of the devices and the negative prompt on the other."""
    size = _fitted(sheet.width * 0.48, sheet.height * 0.84, ratio)
    half = _COUNT // 2
    for x, devices, text in ((0.25, range(half), "prompt"), (0.75, range(half, _COUNT), "negative prompt")):
        _centred(sheet, _bands(size, devices), x, 0.44)
        _label(sheet, text, x, 0.94)


def _film(sheet: Image.Image, ratio: float) -> None:
    """Draws frames behind each other, a share of each on each device."""
    size = _fitted(sheet.width * 0.82, sheet.height * 0.8, ratio)
    draw = ImageDraw.Draw(sheet)
    left, top = (sheet.width - size[0]) / 2, (sheet.height - size[1]) / 2
    step = min(sheet.width * 0.03, left / 2, top * 0.6)
    for frame in range(4):
        x, y = round(left + (1.5 - frame) * step), round(top - (1.5 - frame) * step)
        sheet.paste(_bands(size, range(_COUNT), labels=frame == 3), (x, y))
        draw.rectangle((x, y, x + size[0], y + size[1]), outline=_PAPER, width=max(1, int(step / 5)))


def _weights(sheet: Image.Image, ratio: float) -> None:
    """Draws devices that each hold a share of every block of the model."""
    draw = ImageDraw.Draw(sheet)
    rows, column = 7, sheet.width / _COUNT
    height = sheet.height * 0.84 / rows
    for device, colour in enumerate(_DEVICES):
        for row in range(rows):
            left, top = column * device, height * row
            draw.rectangle((left + 8, top, left + column - 8, top + height * 0.7), colour)
        _label(sheet, f"GPU {device}", (device + 0.5) / _COUNT, 0.92)


def _two(
    sheet: Image.Image, ratio: float, before: Callable[[tuple[int, int]], Image.Image], text: str
) -> None:
    size = _fitted(sheet.width * 0.45, sheet.height * 0.84, ratio)
    _centred(sheet, before(size), 0.24, 0.44)
    _label(sheet, text, 0.24, 0.94)
    _arrow(sheet, 0.5, 0.44)
    _centred(sheet, _bands(size, range(_COUNT)), 0.76, 0.44)


def _given(size: tuple[int, int]) -> Image.Image:
    """Draws the picture that a person brings."""
    return landscape(size[1], _GREY).resize(size)


def _masked(size: tuple[int, int]) -> Image.Image:
    """Draws the picture that a person brings, with a mask over the part to paint again."""
    picture = _given(size)
    width, height = size
    ImageDraw.Draw(picture).ellipse((width * 0.22, height * 0.14, width * 0.78, height * 0.7), "#ffffff")
    return picture


def _outlines(size: tuple[int, int]) -> Image.Image:
    """Draws the picture's edges, as a ControlNet takes them."""
    edges = _given(size).convert("L").filter(ImageFilter.FIND_EDGES)
    return (
        edges.filter(ImageFilter.MaxFilter(5)).point(lambda value: 255 if value > 12 else 16).convert("RGB")
    )


def _plates(size: tuple[int, int]) -> Image.Image:
    """Draws stacked LoRAs."""
    picture = Image.new("RGB", size, _PAPER)
    draw = ImageDraw.Draw(picture)
    width, height = size
    for row in range(3):
        top = height * (0.12 + 0.28 * row)
        draw.rounded_rectangle((width * 0.08, top, width * 0.92, top + height * 0.22), height / 20, "#b39ddb")
        font = ImageFont.load_default(height // 9)
        draw.text((width / 2, top + height * 0.11), f"LoRA {row + 1}", _PAPER, font, "mm")
    return picture


MOTIFS: dict[str, Callable[[Image.Image, float], None]] = {
    "picture": _picture,
    "prompts": _prompts,
    "film": _film,
    "weights": _weights,
    "from a picture": lambda sheet, ratio: _two(sheet, ratio, _given, "your picture"),
    "mask": lambda sheet, ratio: _two(sheet, ratio, _masked, "picture and mask"),
    "outlines": lambda sheet, ratio: _two(sheet, ratio, _outlines, "ControlNet"),
    "LoRAs": lambda sheet, ratio: _two(sheet, ratio, _plates, "LoRAs"),
}
