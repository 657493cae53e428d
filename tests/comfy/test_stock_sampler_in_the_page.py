"""In a real browser, a stock sampler behind Parallel Model shows the badge, opens its report and can be proved."""

from __future__ import annotations

import re

from graphs import STOCK, Graph
from pages import WRITTEN, choose, menu_of, run, set_widgets, show_prompt, wait_for_badge, words_of
from waiting import wait_until

UNET = "tiny_stock_sampler.safetensors"
MODELS = {UNET: 3}
# The places of the badge that Vue draws, and of its node.
OVER = """() => Object.fromEntries(Object.entries({
  badge: document.querySelector('.parallel-badge'),
  node: document.querySelector('[data-node-id]:has(> .parallel-badge)'),
}).map(([name, e]) => [name, e.getBoundingClientRect().toJSON()]))"""
# Returns Strategy Selector's panel; the page of frontend 1.58 takes it out where its node is out of sight.
PANEL = """() => app.graph.nodes.find(n => n.comfyClass === 'StrategySelector').widgets.find(
  widget => widget.name === 'strategy_panel').element"""
COSTS = r"2 devices \(Ulysses\) · [\d.e-]+ s per step"
WORDS = words_of()


def _graph(kind: str) -> dict:
    """Returns a prompt with a stock sampler of class `kind` behind Parallel Model."""
    graph = Graph()
    strategy = graph.strategy("cpu:2", ulysses=2)
    model = [graph.add("ParallelModel", model=graph.model(STOCK, UNET), strategy=strategy), 0]
    if kind == "KSampler":
        latent = graph.ksampler(model, graph.text(1), graph.text(2), graph.latent(), cfg=3.0)
    else:
        parts = {
            "noise": [graph.add("RandomNoise", noise_seed=5), 0],
            "guider": [graph.add("BasicGuider", model=model, conditioning=graph.text(1)), 0],
            "sampler": [graph.add("KSamplerSelect", sampler_name="euler_ancestral"), 0],
            "sigmas": [graph.add("BasicScheduler", model=model, scheduler="simple", steps=3, denoise=1.0), 0],
        }
        latent = [graph.add(kind, **parts, latent_image=graph.latent()), 0]
    image = [graph.add("ParallelVAEDecode", samples=latent, vae=[graph.add("TestTinyVAE"), 0]), 0]
    graph.add("PreviewImage", images=image)
    return graph.prompt


def test_a_stock_sampler_wears_the_badge_tells_its_report_and_is_proved(page, drawn_by):
    kind = "KSampler" if drawn_by == "canvas" else "SamplerCustomAdvanced"
    show_prompt(page, _graph(kind), kind)
    by_vue = drawn_by == "vue"
    assert WORDS["prove"] in menu_of(page, kind)
    assert WORDS["open_report"] not in menu_of(page, kind)
    assert WORDS["prove"] not in menu_of(page, "ParallelModel")
    run(page)
    wait_for_badge(page, rf"{COSTS} · not compared", by_vue)
    page.wait_for_function(f"() => ({PANEL})().querySelector('.parallel-candidates tr[aria-current]')")
    page.wait_for_function("() => Object.values(app.nodeOutputs).some(({ images }) => images)")

    if by_vue:
        over = page.evaluate(OVER)
        assert over["badge"]["bottom"] <= over["node"]["top"]
        assert over["badge"]["right"] <= over["node"]["right"] + 1
        page.locator(".parallel-badge").click()
    else:
        x, y = next(place for text, *place in page.evaluate(WRITTEN) if " s per step" in text)
        page.mouse.click(x, y - 60)  # above the badge
        assert page.get_by_role("dialog").count() == 0
        page.mouse.click(x, y)
    report = page.get_by_role("dialog")
    report.wait_for()
    words = report.inner_text()
    assert "2 devices (Ulysses) · " in words and "result: exact" in words
    assert report.locator(".parallel-timeline .row").count() == 2
    assert report.locator(".parallel-timeline .row").first.locator("g").count() == 3
    # The picture was decoded after the sampler's end.
    phases = report.locator(".parallel-phases").inner_text()
    assert re.search(r"sampling [\d.]+ s \(\d+ %\)\s+decoding [\d.]+ s \(\d+ %\)", phases)
    assert report.locator(".parallel-phases rect").count() == len(re.findall(r" s \(", phases)) >= 2
    report.get_by_role("button", name="Close").click()
    choose(page, kind, WORDS["open_report"])
    report.get_by_role("button", name="Close").click()

    choose(page, kind, WORDS["prove"])
    proof = page.get_by_role("dialog", name=WORDS["proof"].format(count=2))
    proof.wait_for()
    words = proof.inner_text()
    assert WORDS["same_picture"] in words and " one device · exact" in words
    proof.get_by_role("button", name="Close").click()
    wait_for_badge(page, COSTS, by_vue)

    page.reload()
    wait_for_badge(page, COSTS, by_vue)
    set_widgets(page, "TestLatent", batch_index="none")  # it fails, so the sampler never starts
    run(page)
    wait_for_badge(page, "s per step", by_vue, shown=False)
    wait_until(lambda: WORDS["open_report"] not in menu_of(page, kind))
