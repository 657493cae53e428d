"""Drawn pictures are of their sources as they are now, of which they contain a digest; rooms follow the imports."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from PIL import Image

import draw_brand
import draw_overview
import draw_rooms
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


def test_the_picture_of_rooms_is_of_the_imports_as_they_are():
    assert draw_rooms.main(["--check"]) == 0, "run python scripts/draw_rooms.py"


@pytest.fixture
def copy(tmp_path):
    for folder in ("parallel_backend", "nodes"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / draw_rooms.PAGE).parent.mkdir()
    shutil.copy(ROOT / draw_rooms.PAGE, tmp_path / draw_rooms.PAGE)
    return tmp_path


def test_a_new_import_is_noticed_and_drawn(copy):
    file = copy / "parallel_backend" / "job" / "__init__.py"
    file.write_text(file.read_text("utf-8") + "\nfrom ..rank import work\n", "utf-8")
    assert draw_rooms.main(["--check"], copy) == 1
    assert draw_rooms.main([], copy) == 0 and "    job --> rank\n" in (copy / draw_rooms.PAGE).read_text(
        "utf-8"
    )
    assert draw_rooms.main(["--check"], copy) == 0


def test_a_page_without_the_marks_is_named(copy):
    (copy / draw_rooms.PAGE).write_text("# How it works\n", "utf-8")
    with pytest.raises(ValueError, match="how-it-works"):
        draw_rooms.main(["--check"], copy)
