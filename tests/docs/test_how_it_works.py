"""The documents name files that exist, the rooms as the imports are checked, and as many files as they say."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HOW = ROOT / "docs" / "how-it-works.md"
# docs/compatibility.md names tests of one folder, and has a test of its own.
PAGES = [
    ROOT / "README.md",
    *(page for page in sorted((ROOT / "docs").rglob("*.md")) if page.name != "compatibility.md"),
]
FILE = re.compile(r"(?<![\w/.*-])((?:[\w.-]+/)*[\w-]+\.(?:py|js|sh|toml))(?![\w-])")
FOLDER = re.compile(r"`((?:[a-z_]+/)+)`")
LINK = re.compile(r"\]\((?!https?:|#)([^)#]+)")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_what_a_page_names_exists(page):
    """Paths begin at the root or in parallel_backend/."""
    text = page.read_text()
    named = {*FILE.findall(text), *FOLDER.findall(text)}
    missing = {
        name
        for name in named
        if not any((base / name).exists() for base in (ROOT, ROOT / "parallel_backend"))
    }
    assert missing == set()
    assert [link for link in LINK.findall(text) if not (page.parent / link).exists()] == []


def _rows(heading: str) -> list[list[str]]:
    section = HOW.read_text().partition(f"## {heading}\n")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_the_table_of_rooms_is_the_one_that_is_checked():
    checked = (ROOT / "tests" / "test_layers.py").read_text()
    (table,) = re.findall(r"^ROOMS = (\{.*?^\})", checked, re.DOTALL | re.MULTILINE)
    rooms = ast.literal_eval(table.replace("set()", "()"))
    told = {room: set(re.findall(r"`(\w+)/`", allowed)) for room, allowed in _rows("The rooms")}
    assert {room.strip("`/"): allowed for room, allowed in told.items()} == {
        room: set(allowed) for room, allowed in rooms.items()
    }


def test_a_latent_passes_as_many_files_as_the_page_says():
    files = [file for _, file, _ in _rows("The path of a latent")]
    said = re.search(r"its\ntokens or its velocity: (\d+)", HOW.read_text())
    assert len(set(files)) == len(files) == int(said[1])
