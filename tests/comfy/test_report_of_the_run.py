"""In a real browser, nodes show only the latest run, whether it goes on, was cancelled, failed or succeeded."""

from __future__ import annotations

import json
import re

from graphs import Graph
from pages import REPORT, run, set_widget, show_prompt
from waiting import wait_until

UNET = "tiny_report.safetensors"
MODELS = {UNET: 4}
SHORT = "tiny_report_cut_off.safetensors"
HEADLINE = "() => document.querySelector('.parallel-headline').textContent"
PHASE = """() => app.graph.nodes.find(n => n.comfyClass === 'ParallelSampler').widgets.find(
  w => w.name.includes('text-preview'))?.value || ''"""
RUNNING = "async () => (await (await app.api.fetchApi('/queue')).json()).queue_running.length"
ROWS = "() => document.querySelectorAll('.parallel-candidates tr').length"
# Lists each device and its number of steps with bars of all three parts.
TIMELINE = """() => [...document.querySelectorAll('.parallel-timeline .row')].flatMap(row => [
  row.querySelector('span').textContent,
  [...row.querySelectorAll('g')].filter(g => g.querySelectorAll('rect').length === 3).length])"""


def _wait_for_report(page, words: str) -> None:
    page.wait_for_function(f"() => ({REPORT})().startsWith({json.dumps(words)})", timeout=120_000)


def _run(page, **sampler) -> None:
    for name, value in sampler.items():
        set_widget(page, "ParallelSampler", name, value)
    run(page)


def test_a_run_that_goes_on_or_ended_badly_shows_nothing_of_the_one_before(page, measuring):
    graph = Graph()
    loader = graph.parallel_loader(UNET, "cpu:2")
    latent = graph.parallel_sampler(loader, graph.text(1), graph.text(2), graph.latent(), cfg=3.0)
    graph.save(latent, "report.safetensors")
    show_prompt(page, graph.prompt, "ParallelSampler")
    _wait_for_report(page, "After a run")
    _run(page, seed=1)
    _wait_for_report(page, "strategy: ")
    assert page.evaluate(ROWS) > 1
    said = (
        r"2 devices \(.+\) · [\d.e-]+ s per step · (.+ one device|not compared) · same picture as one device"
    )
    assert re.fullmatch(rf"{said}|one device · [\d.e-]+ s per step", page.evaluate(HEADLINE))

    assert page.evaluate(TIMELINE) == ["cpu:0", 3, "cpu:1", 3]
    assert page.evaluate(PHASE) == ""  # the panel already shows the result

    _run(page, seed=2, steps=4000)
    _wait_for_report(page, "Running")
    assert page.evaluate(ROWS) == 0 and page.evaluate(HEADLINE) == "" and page.evaluate(TIMELINE) == []
    page.wait_for_function(PHASE, timeout=60_000)
    wait_until(lambda: page.evaluate(RUNNING) == 1, 60)
    page.reload()
    _wait_for_report(page, "Running")
    page.evaluate("() => app.api.interrupt()")
    _wait_for_report(page, "The latest run was cancelled")
    page.wait_for_function(f"() => ({PHASE})() === ''", timeout=20_000)
    page.reload()
    _wait_for_report(page, "The latest run was cancelled")
    assert page.evaluate(ROWS) == 0

    _run(page, seed=3, steps=2)
    _wait_for_report(page, "strategy: ")
    # The loader refuses the file, so the sampler never starts.
    folder = measuring[0].server.base_directory / "models" / "diffusion_models"
    (folder / SHORT).write_bytes((folder / UNET).read_bytes()[:100])
    set_widget(page, "ParallelFluxLoader", "unet_name", SHORT)
    _run(page, seed=4)
    page.wait_for_selector(".parallel-report.problem", timeout=60_000)
    assert page.evaluate(REPORT) != "The latest run failed."
    assert page.evaluate(ROWS) == 0

    set_widget(page, "ParallelFluxLoader", "unet_name", UNET)
    _run(page, seed=3)  # ComfyUI has every output in its cache
    _wait_for_report(page, "strategy: ")
