"""In a real browser: a failure, or a refusal at Run, speaks on the panel of the node that did not run, and the time
that a run still needs stands where its progress is."""

from __future__ import annotations

import pytest

from graphs import Graph
from pages import REPORT, run, set_widget, show_prompt

UNET = "tiny_failures.safetensors"
LEFT = "() => document.querySelector('.parallel-left')?.textContent ?? ''"


@pytest.fixture(scope="module", autouse=True)
def model(measuring):
    """There before the page asks which models there are."""
    measuring[0].write_flux(UNET, single_blocks=4)


def _show(page) -> None:
    graph = Graph()
    loader = graph.parallel_loader(UNET, "cpu:2", ulysses=2)
    latent = graph.parallel_sampler(loader, graph.text(1), graph.text(2), graph.latent(), seed=71)
    graph.save(latent, "failures.safetensors")
    show_prompt(page, graph.prompt, "ParallelSampler")
    page.wait_for_selector(".parallel-report", timeout=60_000)


@pytest.mark.parametrize("size", [(1366, 768), (1920, 1080)], ids=["laptop", "desktop"])
def test_the_panel_says_what_failed_what_was_refused_and_how_long_a_run_still_takes(page, drawn_by, size):
    page.set_viewport_size({"width": size[0], "height": size[1]})
    _show(page)
    for name, value in (("channels", 5), ("draw", 1)):
        set_widget(page, "TestLatent", name, value)
    run(page)
    page.wait_for_selector(".parallel-report.problem", timeout=120_000)
    assert len(page.evaluate(REPORT)) > 30 and page.evaluate(REPORT) != "The latest run failed."

    for name, value in (("channels", 16), ("draw", -1)):
        set_widget(page, "TestLatent", name, value)
    set_widget(page, "ParallelSampler", "steps", 0)
    page.evaluate("() => app.queuePrompt(0, 1).catch(() => {})")
    page.wait_for_function(f"() => ({REPORT})().startsWith('ComfyUI refused')", timeout=60_000)
    assert "steps" in page.evaluate(REPORT)

    set_widget(page, "ParallelSampler", "steps", 4000)
    run(page)
    page.wait_for_function(
        f"() => /^step [0-9]+ of 4000 · about [0-9]+ (s|min|h) left$/.test(({LEFT})())", timeout=120_000
    )
    page.evaluate("() => app.api.interrupt()")
    page.wait_for_function(f"() => ({REPORT})() === 'The latest run was cancelled.'", timeout=60_000)
    assert page.evaluate(LEFT) == ""
