"""In a real browser, exactly the inputs that cannot run are red until they are corrected, and one click corrects them.
A toast does not cover ComfyUI's card of errors."""

from __future__ import annotations

import json

import pytest

from graphs import STOCK, Graph
from pages import one_sampler, run, show_prompt, toast

UNET = "tiny_refused.safetensors"  # two attention heads
MODELS = {UNET: 1}
MARKED = """() => Object.values(app.lastNodeErrors ?? {}).flatMap(
  node => node.errors.map(error => [error.extra_info.input_name, error.message]))"""
VALUES = """() => Object.fromEntries(
  app.graph.nodes.find(n => n.comfyClass === 'StrategySelector').widgets.map(w => [w.name, w.value]))"""
BOXES = """() => ['[data-testid=error-overlay]', '.parallel-toast, [data-testid=toast]'].map(
  name => [...document.querySelectorAll(name)].at(-1).getBoundingClientRect().toJSON())"""


@pytest.fixture
def graph(page):
    show_prompt(page, one_sampler(UNET, ulysses=3, ring=2).prompt, "StrategySelector")
    page.get_by_role("button", name="Apply").wait_for()


def _queued(page) -> int:
    queue = page.evaluate("async () => (await (await app.api.fetchApi('/queue')).json())")
    return len(queue["queue_running"]) + len(queue["queue_pending"])


def test_a_strategy_that_cannot_run_is_red_on_its_inputs_until_it_is_mended_with_a_click(page, graph):
    run(page)
    page.wait_for_function(f"() => ({MARKED})().length")
    marked = page.evaluate(MARKED)
    assert {name for name, _ in marked} == {"ulysses_degree", "ring_degree", "devices"}
    assert len(marked) == 3
    assert all(words.startswith("Ring 2 × Ulysses 3 needs 6 devices") for _, words in marked)
    assert _queued(page) == 0

    apply = page.get_by_role("button", name="Apply")
    assert apply.inner_text() == "Apply ring_degree 1, ulysses_degree 2"
    before = page.evaluate(VALUES)
    apply.click()
    page.wait_for_function(f"() => !({MARKED})().length")
    after = page.evaluate(VALUES)
    assert after == {**before, "ring_degree": 1, "ulysses_degree": 2}
    apply.wait_for(state="detached")
    page.locator("[data-testid=error-overlay]").wait_for(state="hidden")


def test_what_only_the_model_forbids_is_red_and_mended_too_behind_a_loader_of_comfyuis_own(page):
    graph = Graph()
    stock = graph.model(STOCK, UNET)
    loader = graph.add("ParallelModel", model=stock, strategy=graph.strategy("cpu:3", ulysses=3))
    latent = graph.parallel_sampler([loader, 1], graph.text(1), graph.text(2), graph.latent())
    graph.save(latent, "refused.safetensors")
    show_prompt(page, graph.prompt, "StrategySelector")
    apply = page.get_by_role("button", name="Apply")
    apply.wait_for()
    run(page)
    page.wait_for_function(f"() => ({MARKED})().length")
    ((name, words),) = page.evaluate(MARKED)
    assert name == "ulysses_degree" and "is more than the 2 attention heads" in words and _queued(page) == 0
    apply.click()
    page.wait_for_function(f"() => !({MARKED})().length")
    after = page.evaluate(VALUES)
    assert (after["ulysses_degree"], after["ring_degree"]) == (1, 3)
    apply.wait_for(state="detached")


def test_a_toast_leaves_comfyuis_card_of_errors_free_and_goes_with_its_cause(page, graph):
    run(page)
    page.locator("[data-testid=error-overlay]").wait_for()
    failed = {"severity": "error", "summary": "Failed", "detail": "Again", "life": None, "about": "cpu:0"}

    def send(**changes) -> None:
        detail = json.dumps({**failed, **changes})
        page.evaluate(f"() => app.api.dispatchCustomEvent('parallel_sampling.toast', {detail})")

    send()
    page.wait_for_function(
        f"() => {{ const [card, toast] = ({BOXES})(); return toast.right <= card.left && toast.left >= 0; }}"
    )
    send(about="cpu:1", summary="Another", life=60_000)
    toast(page, "Another").wait_for()
    assert toast(page, "Failed").is_visible()
    send(severity="success", summary="Started", life=60_000)
    toast(page, "Started").wait_for()
    toast(page, "Failed").wait_for(state="detached")
