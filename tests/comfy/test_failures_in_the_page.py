"""In a real browser: the panel of a node that did not run shows its failure, or ComfyUI's refusal at Run. A running
node's panel shows its progress and the time left."""

from __future__ import annotations

from graphs import Graph
from pages import REPORT, run, set_widget, show_prompt

UNET = "tiny_failures.safetensors"
MODELS = {UNET: 4}
LEFT = "() => document.querySelector('.parallel-left')?.textContent ?? ''"


def _show(page) -> None:
    graph = Graph()
    loader = graph.parallel_loader(UNET, "cpu:2", ulysses=2)
    latent = graph.parallel_sampler(loader, graph.text(1), graph.text(2), graph.latent(), seed=71)
    graph.save(latent, "failures.safetensors")
    show_prompt(page, graph.prompt, "ParallelSampler")
    page.wait_for_selector(".parallel-report", timeout=60_000)


def test_the_panel_says_what_failed_what_was_refused_and_how_long_a_run_still_takes(page, drawn_by):
    """One case has the window of a laptop, the other that of a desktop."""
    width, height = (1366, 768) if drawn_by == "canvas" else (1920, 1080)
    page.set_viewport_size({"width": width, "height": height})
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
