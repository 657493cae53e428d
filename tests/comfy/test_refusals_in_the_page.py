"""In a real browser, exactly the inputs that cannot run are red until they are corrected, and one click corrects them.
A toast does not cover ComfyUI's card of errors."""

from __future__ import annotations

import pytest

from graphs import STOCK, Graph
from pages import one_sampler, queued, refused_inputs, run, send, show_prompt, toast, widgets

UNET = "tiny_refused.safetensors"  # two attention heads
MODELS = {UNET: 1}
NONE_MARKED = "() => !Object.values(app.lastNodeErrors ?? {}).some(node => node.errors.length)"
BOXES = """() => ['[data-testid=error-overlay]', '.parallel-toast, [data-testid=toast]'].map(
  name => [...document.querySelectorAll(name)].at(-1).getBoundingClientRect().toJSON())"""


@pytest.fixture
def graph(page):
    show_prompt(page, one_sampler(UNET, ulysses=3, ring=2).prompt, "StrategySelector")
    page.get_by_role("button", name="Apply").wait_for()


def test_a_strategy_that_cannot_run_is_red_on_its_inputs_until_it_is_mended_with_a_click(
    page, measuring, graph
):
    run(page)
    marked = refused_inputs(page)
    assert sorted(name for name, _ in marked) == ["devices", "ring_degree", "ulysses_degree"]
    assert all(words.startswith("Ring 2 × Ulysses 3 needs 6 devices") for _, words in marked)
    assert queued(measuring) == []

    apply = page.get_by_role("button", name="Apply")
    assert apply.inner_text() == "Apply ring_degree 1, ulysses_degree 2"
    before = widgets(page, "StrategySelector")
    apply.click()
    page.wait_for_function(NONE_MARKED)
    assert widgets(page, "StrategySelector") == {**before, "ring_degree": 1, "ulysses_degree": 2}
    apply.wait_for(state="detached")
    page.locator("[data-testid=error-overlay]").wait_for(state="hidden")


def test_what_only_the_model_forbids_is_red_and_mended_too_behind_a_loader_of_comfyuis_own(page, measuring):
    graph = Graph()
    stock = graph.model(STOCK, UNET)
    loader = graph.add("ParallelModel", model=stock, strategy=graph.strategy("cpu:3", ulysses=3))
    latent = graph.parallel_sampler([loader, 1], *graph.request())
    graph.save(latent, "refused.safetensors")
    show_prompt(page, graph.prompt, "StrategySelector")
    apply = page.get_by_role("button", name="Apply")
    apply.wait_for()
    run(page)
    ((name, words),) = refused_inputs(page)
    assert name == "ulysses_degree" and "is more than the 2 attention heads" in words
    assert queued(measuring) == []
    apply.click()
    page.wait_for_function(NONE_MARKED)
    after = widgets(page, "StrategySelector")
    assert (after["ulysses_degree"], after["ring_degree"]) == (1, 3)
    apply.wait_for(state="detached")


def test_a_toast_leaves_comfyuis_card_of_errors_free_and_goes_with_its_cause(page, graph):
    run(page)
    page.locator("[data-testid=error-overlay]").wait_for()
    failed = {"severity": "error", "summary": "Failed", "detail": "Again", "life": None, "about": "cpu:0"}
    send(page, "toast", failed)
    page.wait_for_function(
        f"() => {{ const [card, toast] = ({BOXES})(); return toast.right <= card.left && toast.left >= 0; }}"
    )
    send(page, "toast", failed | {"about": "cpu:1", "summary": "Another", "life": 60_000})
    toast(page, "Another").wait_for()
    assert toast(page, "Failed").is_visible()
    send(page, "toast", failed | {"severity": "success", "summary": "Started", "life": 60_000})
    toast(page, "Started").wait_for()
    toast(page, "Failed").wait_for(state="detached")
