"""In a real browser: while prompts wait that differ by the seed, Parallel Sampler's panel offers one image per GPU,
says what that does, and takes it back; what cannot be computed at once is not offered."""

from __future__ import annotations

import itertools
import json

import pytest

from comfy_harness import ROOT
from graphs import Graph
from pages import show_prompt

UNET = "tiny_waiting.safetensors"
OFFER = "() => document.querySelector('.parallel-waiting')?.innerText ?? ''"
REPORT = "() => document.querySelector('.parallel-report')?.textContent ?? ''"
INSIDE = """() => {
  const [box, panel] = ['.parallel-waiting', '.parallel-run'].map(
    s => document.querySelector(s).getBoundingClientRect());
  return box.height > 0 && box.top >= panel.top - 1 && box.bottom <= panel.bottom + 1;
}"""
QUEUE = """async ([seeds, inputs]) => {
  const sampler = app.graph.nodes.find(n => n.comfyClass === 'ParallelSampler');
  const set = (name, value) => { sampler.widgets.find(w => w.name === name).value = value; };
  set('control_after_generate', 'fixed');
  for (const [name, value] of Object.entries(inputs)) set(name, value);
  for (const seed of seeds) { set('seed', seed); await app.queuePrompt(0, 1); }
}"""
WORDS = json.loads((ROOT / "locales" / "en" / "main.json").read_text("utf-8"))["parallel_sampling"]
_names = itertools.count()


@pytest.fixture(scope="module", autouse=True)
def model(measuring):
    """There before the page asks which models there are."""
    measuring[0].write_flux(UNET, single_blocks=2)


@pytest.fixture(params=["canvas", "vue"])
def drawn_by(page, request):
    def turn(name: str, on: bool) -> None:
        page.evaluate("([name, on]) => app.extensionManager.setting.set(name, on)", [name, on])

    turn("Comfy.VueNodes.Enabled", request.param == "vue")
    yield request.param
    turn("Comfy.VueNodes.Enabled", False)
    turn("parallel_sampling.one_image_per_gpu", False)


def _show(page, waiting: int) -> None:
    """A graph whose sampler begins when as many prompts wait."""
    graph = Graph()
    loader = graph.parallel_loader(UNET, "cpu:2")
    latent = graph.add(
        "TestUntilWaiting", latent=graph.latent(), prompts=waiting, name=f"waiting-{next(_names)}"
    )
    sampled = graph.parallel_sampler(loader, graph.text(1), graph.text(2), [latent, 0])
    graph.save(sampled, "waiting.safetensors")
    show_prompt(page, graph.prompt, "ParallelSampler")
    page.wait_for_selector(".parallel-report", state="attached", timeout=60_000)


def _wait_for(page, what: str, words: str) -> None:
    page.wait_for_function(f"words => ({what})().includes(words)", arg=words, timeout=60_000)


def test_the_offer_counts_a_click_computes_at_once_and_what_cannot_be_says_why(page, drawn_by):
    _show(page, waiting=4)
    assert page.evaluate(OFFER) == ""
    page.evaluate(QUEUE, [[1, 2, 3, 4], {}])
    _wait_for(page, OFFER, WORDS["together_offer"].replace("{count}", "3"))
    assert WORDS["together_hint"] in page.evaluate(OFFER) and page.evaluate(INSIDE)
    page.get_by_role("button", name=WORDS["together_start"]).click()
    _wait_for(page, OFFER, WORDS["together_on"].replace("{count}", "3"))
    assert page.get_by_role("button", name=WORDS["together_stop"]).is_visible()
    page.evaluate(QUEUE, [[5], {}])
    _wait_for(page, REPORT, "one image per GPU, for 2 prompts")
    page.wait_for_function(f"() => ({OFFER})() === ''", timeout=60_000)

    _show(page, waiting=2)
    page.evaluate(QUEUE, [[6, 7], {}])
    _wait_for(page, OFFER, WORDS["together_on"].replace("{count}", "1"))
    page.get_by_role("button", name=WORDS["together_stop"]).click()
    _wait_for(page, OFFER, WORDS["together_offer"].replace("{count}", "1"))
    page.evaluate(QUEUE, [[8], {}])
    _wait_for(page, REPORT, "strategy: ")
    assert "one image per GPU" not in page.evaluate(REPORT)

    _show(page, waiting=2)
    page.evaluate(QUEUE, [[1, 2], {"sampler_name": "euler_ancestral"}])
    _wait_for(page, OFFER, "the sampler euler_ancestral gives an image of a batch otherwise than alone")
    assert page.get_by_role("button", name=WORDS["together_start"]).count() == 0
    page.evaluate(QUEUE, [[3], {"sampler_name": "euler"}])
    page.wait_for_function(f"() => ({OFFER})() === ''", timeout=60_000)
