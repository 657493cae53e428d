"""In a real browser: the pack's texts have enough contrast in the dark and light themes, by their computed colours."""

from __future__ import annotations

import pytest

from pages import command, set_widgets, template

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
