"""The decisions: the index by subject lists each of them once, and none is superseded in part."""

from __future__ import annotations

import re
from pathlib import Path

DECISIONS = Path(__file__).resolve().parents[2] / "docs" / "decisions"
FILES = sorted(DECISIONS.glob("[0-9]*.md"))


def test_the_index_has_each_once():
    names = [path.name for path in FILES]
    assert sorted(re.findall(r"\]\((\S+?\.md)\)", (DECISIONS / "README.md").read_text("utf-8"))) == names
    assert len({name[:3] for name in names}) == len(names)


def test_none_is_superseded_in_part():
    """A part that no longer holds is removed from its decision, or the whole decision is removed."""
    assert [path.name for path in FILES if "uperseded" in path.read_text("utf-8")] == []
