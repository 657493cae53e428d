"""In a real browser: the help's pictures of Strategy Selector show the words that its panel says today."""

from __future__ import annotations

import json

from draw_panels import PAGES, PICTURES, WORKFLOW, show
from drawn_from import source_of


def test_a_picture_of_strategy_selector_shows_what_stands_there(page):
    for name in PICTURES:
        words = show(page, json.loads(WORKFLOW.read_text("utf-8")), name)
        assert "Strategy Selector" in words and len(words.splitlines()) > 5
        assert source_of(PAGES / f"{name}.png") == words, f"{name} is old: run python scripts/draw_panels.py"
