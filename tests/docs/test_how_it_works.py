"""The documents name files and tests that exist, and the index of the decisions lists each of them once."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# docs/compatibility.md names its tests without their folder.
PAGES = [
    ROOT / "README.md",
    *(page for page in sorted((ROOT / "docs").rglob("*.md")) if page.name != "compatibility.md"),
]
FILE = re.compile(r"(?<![\w/.*-])((?:[\w.-]+/)*[\w-]+\.(?:py|js|sh|toml))(?![\w-])")
FOLDER = re.compile(r"`((?:[a-z_]+/)+)`")
LINK = re.compile(r"\]\((?!https?:|#)([^)#]+)")
DECISIONS = sorted((ROOT / "docs" / "decisions").glob("[0-9]*.md"))
# The page's words for a result.
RESULTS = {"exact", "refused", "native takes its place", "approximate", "exact without it"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_what_a_page_names_exists(page):
    """A path counts from the root or from parallel_backend/."""
    text = page.read_text()
    named = {*FILE.findall(text), *FOLDER.findall(text)}
    missing = {
        name
        for name in named
        if not any((base / name).exists() for base in (ROOT, ROOT / "parallel_backend"))
    }
    assert missing == set()
    assert [link for link in LINK.findall(text) if not (page.parent / link).exists()] == []


def _rows() -> list[list[str]]:
    lines = (ROOT / "docs" / "compatibility.md").read_text().splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| ")]
    return [row for row in rows if row[0] != "What"]


def test_the_page_of_compatibility_has_rows():
    assert len(_rows()) > 20 and all(len(row) == 3 for row in _rows())


@pytest.mark.parametrize("row", _rows(), ids=lambda row: row[0])
def test_each_result_is_backed_by_a_test(row):
    _, result, test = row
    assert result in RESULTS
    file, _, name = test.strip("`").partition("::")
    tree = ast.parse((ROOT / "tests" / "comfy" / file).read_text())
    assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_the_index_has_each_decision_once():
    names = [path.name for path in DECISIONS]
    index = (ROOT / "docs" / "decisions" / "README.md").read_text("utf-8")
    assert sorted(re.findall(r"\]\((\S+?\.md)\)", index)) == names
    assert len({name[:3] for name in names}) == len(names)


def test_no_decision_is_superseded_in_part():
    """A part that no longer holds is removed from its decision, or the whole decision is removed."""
    assert [path.name for path in DECISIONS if "uperseded" in path.read_text("utf-8")] == []
