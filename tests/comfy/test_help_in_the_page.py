"""In a real browser: a node's information shows its help page, whose pictures show what the panel says today; ComfyUI's
Templates dialog lists ours, and no node of ours covers another."""

from __future__ import annotations

import json
import re

from comfy_harness import ROOT
from draw_panels import PAGES, PICTURES, WORKFLOW, show
from drawn_from import source_of
from pages import OVERLAPS, locale, template


def test_the_help_of_a_node_is_its_page(page, set_setting):
    set_setting("Comfy.RightSidePanel.IsOpen", False)  # for its reset: the button opens it
    page.evaluate("workflow => app.loadGraphData(workflow)", template())
    page.evaluate("() => app.canvas.selectNode(app.graph.nodes.find(n => n.type === 'ParallelSampler'))")
    page.get_by_test_id("info-button").first.dispatch_event("click")  # the tabs may cover it
    help_page = page.locator(".node-help-content")
    help_page.get_by_role("heading", name="Parallel Sampler").wait_for()
    assert "PipeFusion is approximate after its warm-up" in help_page.inner_text()
    picture = help_page.locator("img").element_handle()
    page.wait_for_function("picture => picture.naturalWidth > 0", arg=picture)


def test_the_title_of_a_new_node_is_not_cut(page):
    nodes = locale("en", "nodeDefs")
    left = page.evaluate(
        """names => names.map(name => {
          const node = LiteGraph.createNode(name);
          app.graph.add(node);
          const pen = document.createElement("canvas").getContext("2d");
          pen.font = node.titleFontStyle;
          return node.size[0] - 2 * LiteGraph.NODE_TITLE_HEIGHT - pen.measureText(node.title).width;
        })""",
        sorted(nodes),
    )
    assert len(left) == len(nodes) and all(pixels >= 0 for pixels in left), left


def test_templates_open_readable_and_no_node_lies_on_another_at_the_sizes_that_the_page_gives_them(
    page, drawn_by
):
    """In a laptop's window. ComfyUI's page enlarges a node whose widgets do not fit, and draws no text below 8 pixels
    (0.57 of 14)."""
    page.set_viewport_size({"width": 1366, "height": 768})
    for path in sorted((ROOT / "example_workflows").glob("*.json")):
        workflow = template(path.stem)
        count = len(workflow["nodes"])
        page.evaluate(
            "w => app.loadGraphData(w, true, true, 'template', { openSource: 'template' })", workflow
        )
        page.wait_for_function("n => app.graph.nodes.length === n", arg=count)
        if drawn_by == "vue":
            drawn = "n => document.querySelectorAll('.lg-node[data-node-id]').length === n"
            page.wait_for_function(drawn, arg=count)
        page.wait_for_function("() => app.canvas.ds.scale * 14 >= 8 && app.canvas.ds.scale < 0.77")
        assert page.evaluate(OVERLAPS) == [], path.stem


_SHOWN = "titles => titles.every(t => [...document.querySelectorAll('[role=dialog] *')].some(e => e.textContent === t))"
_PICTURES = re.compile(r"/workflow_templates/comfyui-parallel-sampling/.*\.jpg$")


def test_the_templates_browser_names_ours_in_words_and_shows_their_pictures(page):
    titles = sorted(path.stem for path in (ROOT / "example_workflows").glob("*.json"))
    assert all(" " in title and "_" not in title for title in titles)
    page.evaluate("() => app.extensionManager.command.execute('Comfy.BrowseTemplates')")
    ours = page.locator("[role=dialog]").get_by_text("Parallel Sampling", exact=True).first
    ours.wait_for()
    with page.expect_response(_PICTURES) as first:
        ours.click()
    page.wait_for_function(_SHOWN, arg=titles)
    folder = first.value.url.rpartition("/")[0]  # others load when they scroll into view
    for title in titles:
        picture = page.request.get(f"{folder}/{title}.jpg")
        assert picture.ok and picture.headers["content-type"] == "image/jpeg", title
    page.keyboard.press("Escape")
    ours.wait_for(state="detached")


def test_a_picture_of_strategy_selector_shows_what_stands_there(page):
    for name in PICTURES:
        words = show(page, json.loads(WORKFLOW.read_text("utf-8")), name)
        assert "Strategy Selector" in words and len(words.splitlines()) > 5
        assert source_of(PAGES / f"{name}.png") == words, f"{name} is old: run python scripts/draw_panels.py"
