"""docs/compatibility.md: every row names a test that exists, and its result is one of the page's fixed words."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
WORDS = {"exact", "refused", "native takes its place", "approximate", "exact without it"}


def _rows() -> list[list[str]]:
    lines = (ROOT / "docs" / "compatibility.md").read_text().splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| ")]
    return [row for row in rows if row[0] != "What"]


def test_the_page_has_rows():
    assert len(_rows()) > 20 and all(len(row) == 3 for row in _rows())


@pytest.mark.parametrize("row", _rows(), ids=lambda row: row[0])
def test_each_cell_is_backed_by_a_test(row):
    _, result, test = row
    assert result in WORDS
    file, _, name = test.strip("`").partition("::")
    tree = ast.parse((ROOT / "tests" / "comfy" / file).read_text())
    assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
