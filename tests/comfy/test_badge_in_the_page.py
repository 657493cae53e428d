"""In a real browser: the badge over a sampler tells what ran, how fast, and, once it is known, what that won."""

from __future__ import annotations

import json

import pytest

from graphs import Graph
from pages import BADGES, run, set_widget, shoot, show_prompt

UNET = {"canvas": "tiny_badge.safetensors", "vue": "tiny_badge_2.safetensors"}  # measured apart
OVER = """() => Object.fromEntries(Object.entries({
  badge: document.querySelector('.parallel-badge'),
  node: document.querySelector('[data-node-id]:has(> .parallel-badge)'),
}).map(([name, e]) => [name, e.getBoundingClientRect().toJSON()]))"""


@pytest.fixture(scope="module", autouse=True)
def models(measuring):
    """There before the page asks which models there are."""
    for blocks, name in enumerate(UNET.values(), 6):
        measuring[0].write_flux(name, single_blocks=blocks)


def test_a_badge_says_what_ran_and_what_it_won_once_one_device_was_measured(page, drawn_by):
    graph = Graph()
    loader = graph.parallel_loader(UNET[drawn_by], "cpu:2", ulysses=2)
    latent = graph.parallel_sampler(loader, graph.text(1), graph.text(2), graph.latent(), seed=1)
    image = [graph.add("VAEDecode", samples=latent, vae=[graph.add("TestTinyVAE"), 0]), 0]
    graph.add("PreviewImage", images=image)
    show_prompt(page, graph.prompt, "ParallelSampler")
    page.wait_for_selector(".parallel-report", timeout=60_000)
    by_vue = json.dumps(drawn_by == "vue")

    def wait_for(pattern: str) -> None:
        page.wait_for_function(f"() => /{pattern}/.test(({BADGES})({by_vue}))", timeout=120_000)

    run(page)
    wait_for(r"2 devices \(Ulysses\) · [\d.e-]+ s per step · not compared")
    if drawn_by == "vue":
        over = page.evaluate(OVER)
        assert (
            over["badge"]["bottom"] <= over["node"]["top"]
            and over["badge"]["right"] <= over["node"]["right"] + 1
        )
    shoot(page, f"badge_{drawn_by}")
    page.get_by_role("button", name="Prove it").click()
    wait_for(r"2 devices \(Ulysses\) · [\d.e-]+ s per step · .* one device")
    page.get_by_role("dialog").get_by_role("button", name="Close").click()
    # From here on it is known to every run; to one that failed nothing is.
    for name, value in (("channels", 5), ("draw", 1)):
        set_widget(page, "TestLatent", name, value)
    set_widget(page, "ParallelSampler", "seed", 2)
    run(page)
    page.wait_for_function(f"() => !/s per step/.test(({BADGES})({by_vue}))", timeout=60_000)
    for name, value in (("channels", 16), ("draw", -1)):
        set_widget(page, "TestLatent", name, value)
    run(page)
    wait_for(r"2 devices \(Ulysses\) · [\d.e-]+ s per step · (.* one device|not compared)")
