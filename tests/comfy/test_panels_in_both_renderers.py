"""In a real browser, drawn by the canvas and by Vue, panels stay readable next to the widgets that ComfyUI adds to a
node, and cover no other node. In the dark and light themes their texts have enough contrast."""

from __future__ import annotations

import pytest

from pages import REPORT, command, one_sampler, run, set_widgets, show_prompt, template

UNET = "tiny_panels.safetensors"  # two attention heads
MODELS = {UNET: 2}
PHASE = "$$node-text-preview"  # ComfyUI's widget with a node's current work
# The height of the visible part of an element, in pixels of the graph.
SEEN = """(selector) => {
  const part = document.querySelector(selector);
  const panel = part.closest('.dom-widget, .lg-node-widget');
  const [inner, outer] = [part, panel].map(one => one.getBoundingClientRect());
  return (Math.min(inner.bottom, outer.bottom) - Math.max(inner.top, outer.top)) / app.canvas.ds.scale;
}"""
HEIGHT = """(type) => {
  const node = app.graph.nodes.find(n => n.type === type);
  const drawn = document.querySelector(`.lg-node[data-node-id="${node.id}"]`)?.getBoundingClientRect().height;
  return drawn ? drawn / app.canvas.ds.scale : node.size[1];
}"""


def _show(page, kind: str) -> None:
    page.set_viewport_size({"width": 1366, "height": 768})
    show_prompt(page, one_sampler(UNET, sampler={"seed": 71, "steps": 60}, ulysses=2).prompt, kind)
    page.wait_for_selector(".parallel-report", state="attached")


def test_a_report_is_readable_beside_a_preview_and_no_empty_line_stays(page, drawn_by):
    _show(page, "ParallelSampler")
    run(page)
    page.locator(".parallel-fold summary").wait_for()
    page.wait_for_function(f"() => !app.graph.nodes.some(n => n.widgets?.some(w => w.name === '{PHASE}'))")
    page.locator(".parallel-fold summary").click()
    page.wait_for_function(f"() => ({SEEN})('.parallel-headline') > 20 && ({SEEN})('.parallel-fold') >= 40")
    assert page.evaluate(REPORT).startswith("strategy")
    run(page)  # ComfyUI shows the work of this run, as it did for the first
    page.wait_for_function(
        f"() => app.graph.nodes.some(n => n.widgets?.some(w => w.name === '{PHASE}' && w.value))"
    )


def test_an_error_and_its_remedy_are_on_strategy_selector_which_stays_as_high(page, drawn_by):
    _show(page, "StrategySelector")
    before = page.evaluate(HEIGHT, "StrategySelector")
    set_widgets(page, "StrategySelector", ulysses_degree=3)
    apply = page.get_by_role("button", name="Apply ulysses_degree 2")
    apply.wait_for()
    assert page.evaluate(HEIGHT, "StrategySelector") == pytest.approx(before, abs=2)
    apply.scroll_into_view_if_needed()
    apply.click()
    apply.wait_for(state="detached")


def test_comfyuis_list_of_parameters_leaves_a_panel_on_its_node(page):
    _show(page, "StrategySelector")
    panel = page.locator(".parallel-strategy")
    before = panel.bounding_box()["width"]
    page.evaluate("() => app.canvas.selectNode(app.graph.nodes.find(n => n.type === 'StrategySelector'))")
    toggle = page.locator("button[aria-label*='roperties']").first
    if not page.get_by_text("Parameters", exact=True).first.is_visible():  # ComfyUI remembers if it was open
        toggle.click()
    page.get_by_text("approximation").last.wait_for()  # the last of its inputs
    assert page.get_by_text("strategy_panel").count() == 0
    page.evaluate("() => app.canvas.selectNode(app.graph.nodes.find(n => n.type === 'ParallelSampler'))")
    page.get_by_text("denoise").last.wait_for()
    assert panel.bounding_box()["width"] == pytest.approx(before, abs=1)
    toggle.click()


# Gives [words, contrast, True if disabled] for each visible text of ours: its colour against the backgrounds behind it,
# blended by their opacities.
CONTRASTS = """() => {
  const pen = Object.assign(document.createElement('canvas'), { width: 1, height: 1 }).getContext('2d');
  const rgba = (colour) => {
    pen.clearRect(0, 0, 1, 1);
    pen.fillStyle = colour;
    pen.fillRect(0, 0, 1, 1);
    const [r, g, b, a] = pen.getImageData(0, 0, 1, 1).data;
    return [r, g, b, a / 255];
  };
  const over = (top, below, opacity = 1) => {
    const a = top[3] * opacity;
    return [0, 1, 2].map((i) => top[i] * a + below[i] * (1 - a)).concat(1);
  };
  const light = (colour) => {
    const [r, g, b] = colour.map((c) => (c / 255 <= 0.04045 ? c / 255 / 12.92 : ((c / 255 + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const found = [];
  for (const root of document.querySelectorAll('.parallel-run, .parallel-strategy, .parallel-status')) {
    const walker = document.createTreeWalker(root, NodeFilter.SHOW_TEXT);
    while (walker.nextNode()) {
      const element = walker.currentNode.parentElement;
      if (!walker.currentNode.data.trim() || !element.checkVisibility({ visibilityProperty: true })) continue;
      const chain = [];
      for (let at = element; at; at = at.parentElement) chain.push(at);
      let back = rgba(getComputedStyle(document.documentElement).getPropertyValue('--comfy-menu-bg'));
      let opacity = 1;
      for (const at of chain.reverse()) {
        const style = getComputedStyle(at);
        opacity *= Number(style.opacity);
        back = over(rgba(style.backgroundColor), back, opacity);
      }
      const front = over(rgba(getComputedStyle(element).color), back, opacity);
      const [one, other] = [light(front), light(back)].sort((a, b) => b - a);
      const disabled = Boolean(element.closest('[aria-disabled=true], :disabled, .impossible, .outdated'));
      found.push([walker.currentNode.data.trim(), (one + 0.05) / (other + 0.05), disabled]);
    }
  }
  return found;
}"""


@pytest.mark.parametrize("theme", ["dark", "light"])
def test_texts_and_disabled_controls_stand_out_from_what_is_behind_them(page, set_setting, theme):
    set_setting("Comfy.ColorPalette", theme)
    page.evaluate("w => app.loadGraphData(w, true, true, 'contrast')", template())
    page.wait_for_selector(".parallel-strategy .basis")
    command(page, "parallel_sampling.status_panel")
    page.wait_for_selector(".parallel-status")
    set_widgets(page, "StrategySelector", mode="manual", ulysses_degree=4, devices="cpu:2")
    page.wait_for_selector(".parallel-strategy [role=alert] p")
    contrasts = page.evaluate(CONTRASTS)
    assert len(contrasts) > 8
    assert [one for one in contrasts if one[1] < (3 if one[2] else 4.5)] == []
