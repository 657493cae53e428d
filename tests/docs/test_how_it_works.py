"""The documents name files that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# docs/compatibility.md names its tests without their folder; test_compatibility.py checks it.
PAGES = [
    ROOT / "README.md",
    *(page for page in sorted((ROOT / "docs").rglob("*.md")) if page.name != "compatibility.md"),
]
FILE = re.compile(r"(?<![\w/.*-])((?:[\w.-]+/)*[\w-]+\.(?:py|js|sh|toml))(?![\w-])")
FOLDER = re.compile(r"`((?:[a-z_]+/)+)`")
LINK = re.compile(r"\]\((?!https?:|#)([^)#]+)")


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
