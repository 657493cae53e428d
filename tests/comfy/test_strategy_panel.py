"""The panel under Strategy Selector in a real browser: what auto saw of each strategy, the chosen one marked."""

from __future__ import annotations

import json

import pytest
from graphs import Graph

UNET = "tiny_panel.safetensors"
# What the panel shows, read as a person would: text of the cells, the marked row, whether anything is cut off.
READ = """() => {
  const panel = document.querySelector('.parallel-candidates');
  return panel && {
    text: panel.textContent,
    rows: [...panel.querySelectorAll('tr')].map(r => [...r.cells].map(c => c.innerText.trim())),
    chosen: [...panel.querySelectorAll('tr[aria-current]')].map(r => r.cells[0].innerText.trim()),
    cut: panel.scrollWidth > panel.clientWidth + 1,
  };
}"""


@pytest.fixture(scope="module", autouse=True)
def model(measuring):
    """There before the page asks which models there are."""
    measuring[0].write_flux(UNET, single_blocks=4)


def _graph() -> Graph:
    graph = Graph()
    loader = graph.parallel_loader(UNET, "cpu:2")
    latent = graph.parallel_sampler(loader, graph.text(1), graph.text(2), graph.latent(), cfg=3.0)
    graph.save(latent, "panel.safetensors")
    return graph


def _load(page, prompt: dict) -> None:
    """Puts the graph on the canvas and moves the selector into view."""
    page.evaluate(f"() => app.loadApiJson({json.dumps(prompt)}, 'panel')")
    page.wait_for_selector(".parallel-candidates", timeout=30_000, state="attached")
    page.evaluate(
        """() => {
          const selector = app.graph.nodes.find(n => n.comfyClass === 'StrategySelector');
          app.canvas.ds.scale = 1;
          app.canvas.ds.offset = [100 - selector.pos[0], 100 - selector.pos[1]];
          app.canvas.setDirty(true, true);
        }"""
    )
    page.wait_for_selector(".parallel-candidates", timeout=30_000)


def test_the_panel_shows_what_auto_saw_and_marks_its_choice(page, tmp_path):
    _load(page, _graph().prompt)
    assert "After a run" in page.evaluate(READ)["text"]

    page.evaluate("() => app.queuePrompt(0, 1)")
    page.wait_for_selector(".parallel-candidates tr[aria-current]", timeout=120_000)
    shown = page.evaluate(READ)
    page.screenshot(path=tmp_path / "panel.png")
    names = [row[0].split("\n")[0].removeprefix("→ ") for row in shown["rows"]]
    assert {"one device", "CFG 2"} <= set(names) and len(names) == len(set(names))
    assert shown["rows"][0][0].startswith("→ ") and len(shown["chosen"]) == 1
    for _, time, memory in shown["rows"]:
        assert " s" in time and "measured" in time and memory.endswith("GiB")
    assert all("exact" in row[0] for row in shown["rows"])
    assert not shown["cut"]


def test_the_panel_is_not_saved_with_the_workflow(page):
    _load(page, _graph().prompt)
    selector = page.evaluate(
        "() => app.graph.serialize().nodes.find(n => n.type === 'StrategySelector').widgets_values"
    )
    assert "" in selector  # device_shares
    assert not any(isinstance(value, dict) for value in selector)
