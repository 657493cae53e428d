"""A mark in a drawn picture that names its sources, so that a test can tell when the picture is out of date."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

from PIL import Image
from PIL.PngImagePlugin import PngInfo

_KEY = "drawn from"


def digest(files: Iterable[Path]) -> str:
    """Returns a digest of the files' contents that does not depend on their line ends."""
    found = hashlib.sha256()
    for file in files:
        found.update(hashlib.sha256(file.read_bytes().replace(b"\r\n", b"\n")).digest())
    return found.hexdigest()


def save(picture: Image.Image, path: Path, source: str) -> None:
    """Saves the picture in the format of the suffix, marked with `source`."""
    if path.suffix == ".png":
        info = PngInfo()
        info.add_itxt(_KEY, source)
        picture.save(path, optimize=True, pnginfo=info)
    else:
        picture.save(path, quality=85, optimize=True, comment=source.encode())


def source_of(path: Path) -> str:
    """Returns the mark that `save` stored, or "" without a mark."""
    with Image.open(path) as picture:
        if path.suffix == ".png":
            picture.load()
            return str(getattr(picture, "text", {}).get(_KEY, ""))
        return bytes(picture.info.get("comment", b"")).decode()
