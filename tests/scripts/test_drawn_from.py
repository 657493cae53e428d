"""Drawn pictures contain a digest of their sources, so that these tests find a picture that is out of date."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

import draw_brand
import draw_overview
from draw_workflows import EXAMPLES, HELP, ROOT, sources
from drawn_from import digest, save, source_of

DRAWN = {path: path.stem for path in sorted(EXAMPLES.glob("*.jpg"))} | {
    ROOT / "web" / "docs" / f"{page}.png": workflow for page, (workflow, _) in HELP.items()
}


@pytest.mark.parametrize("path", DRAWN, ids=lambda path: path.name)
def test_a_drawn_picture_is_of_the_workflow_as_it_is(path):
    assert source_of(path) == digest(sources(DRAWN[path])), (
        "out of date: run python scripts/draw_workflows.py"
    )


def test_the_pictures_of_the_readme_are_what_their_scripts_draw():
    for script, names in ((draw_brand, ("icon", "banner")), (draw_overview, ("overview",))):
        for name in names:
            drawn = source_of(ROOT / "docs" / "images" / f"{name}.png")
            assert drawn == digest(script.SOURCES), f"{name}.png is out of date: run its script in scripts/"


@pytest.mark.parametrize("suffix", ["png", "jpg"])
def test_a_picture_keeps_what_it_was_drawn_from_and_another_file_is_another_source(tmp_path, suffix):
    file, path = tmp_path / "source", tmp_path / f"picture.{suffix}"
    file.write_text("one")
    first = digest([file])
    save(Image.new("RGB", (8, 8)), path, first)
    assert source_of(path) == first
    file.write_text("two")
    assert digest([file]) != first
    Image.new("RGB", (8, 8)).save(path)
    assert source_of(path) == ""


def test_line_ends_make_no_other_source(tmp_path):
    one, other = Path(tmp_path, "one"), Path(tmp_path, "other")
    one.write_bytes(b"a\nb\n")
    other.write_bytes(b"a\r\nb\r\n")
    assert digest([one]) == digest([other])
