"""In a real browser, ComfyUI's Templates dialog lists ours under the pack's name, with readable titles and pictures."""

from __future__ import annotations

import re

from comfy_harness import ROOT

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
