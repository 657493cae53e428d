"""In a real browser: a click on a row of the candidates sets its strategy. One click measures all rows without a time
and leaves the graph, its report and its seed unchanged."""

from __future__ import annotations

import json

from graphs import Graph
from pages import REPORT, command, run, show_prompt, words_of

UNET = "tiny_candidates.safetensors"
MODELS = {UNET: 8}
ROWS = """() => [...document.querySelectorAll('.parallel-candidates tr')].map(row => ({
  name: row.querySelector('button').textContent.replace('→ ', ''), time: row.cells[1].innerText.trim(),
  possible: !row.classList.contains('impossible') }))"""
VALUES = """() => Object.fromEntries(app.graph.nodes.filter(
  n => ['StrategySelector', 'ParallelSampler'].includes(n.comfyClass)).flatMap(
  n => n.widgets.filter(w => w.serialize !== false).map(w => [w.name, w.value])))"""
STEPS = """async () => Object.values(await (await app.api.fetchApi('/history')).json()).flatMap(
  ({ prompt }) => Object.entries(prompt[2])).filter(([id]) => id === 'measured').map(([, node]) => node.inputs.steps)"""

# Draws rows {name: [seconds, possible, chosen]} and returns the names as the table orders them.
ORDER = """async (rows) => {
  const { drawCandidates } = await import('/extensions/comfyui-parallel-sampling/lib/candidates.js');
  const into = document.createElement('div');
  drawCandidates(into, Object.entries(rows).map(([strategy, [seconds, possible, chosen]]) => (
    { strategy, seconds, possible, chosen, step: '', how: '', memory: '' })));
  return [...into.querySelectorAll('button')].map(one => one.textContent);
}"""


def test_what_ran_comes_first_then_the_others_by_time_then_those_without_one_and_last_what_cannot_run(page):
    rows = {
        "not tried": (None, True, False),
        "impossible": (None, False, False),
        "slow": (2.0, True, False),
        "not tried either": (None, True, False),
        "fast": (1.0, True, False),
    }
    rest = ["fast", "slow", "not tried", "not tried either", "impossible"]
    assert page.evaluate(ORDER, rows) == rest
    for ran in ((3.0, True, True), (None, False, True)):
        assert page.evaluate(ORDER, {**rows, "ran": ran}) == ["→ ran", *rest]


def test_the_rest_is_measured_and_a_row_applies_its_strategy(page):
    graph = Graph()
    loader = graph.parallel_loader(UNET, "cpu:2")
    inputs = (graph.text(1), graph.text(2), graph.latent())
    latent = graph.parallel_sampler(loader, *inputs, steps=6, cfg=3.0)
    image = [graph.add("VAEDecode", samples=latent, vae=[graph.add("TestTinyVAE"), 0]), 0]
    graph.add("PreviewImage", images=image)
    show_prompt(page, graph.prompt, "StrategySelector")
    page.wait_for_selector(".parallel-strategy")
    run(page)
    page.wait_for_selector(".parallel-candidates tr[aria-current]")
    rows = page.evaluate(ROWS)
    rest = [row["name"] for row in rows if row["possible"] and row["time"] == "not tried"]
    assert "Ring 2" in rest and "one device" in rest and rows[0]["name"] == "CFG 2"
    report, before = page.evaluate(REPORT), page.evaluate(VALUES)

    page.get_by_role(
        "button", name=words_of()["measure_rest"].replace("{count}", str(len(rest)))
    ).dispatch_event("click")
    known = f"() => ({ROWS})().every(r => !r.possible || r.time.includes('measured'))"
    page.wait_for_function(known, timeout=180_000)
    assert {row["name"] for row in page.evaluate(ROWS)} == {row["name"] for row in rows}
    assert page.evaluate(STEPS) == [4] * len(rest)
    assert page.evaluate(REPORT) == report and page.evaluate(VALUES) == before
    assert before["mode"] == "auto"
    assert page.get_by_role("button", name="Measure").count() == 0

    page.get_by_role("button", name="Ring 2", exact=True).dispatch_event("click")
    after = page.evaluate(VALUES)
    assert after == {**before, "mode": "manual", "ring_degree": 2}
    command(page, "Comfy.Undo")
    page.wait_for_function(f"() => ({VALUES})().mode === 'auto'")
    assert page.evaluate(VALUES) == before
    page.reload()  # the measurements do not count as runs of this graph's sampler
    page.wait_for_function(f"() => ({REPORT})() === {json.dumps(report)}")
