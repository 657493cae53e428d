"""In a real browser, nodes show only the latest run, however it ended or if it goes on."""

from __future__ import annotations

import re

from pages import (
    REPORT,
    one_sampler,
    queued,
    run,
    set_widgets,
    show_again,
    show_prompt,
    wait_for,
    wait_for_report,
)
from waiting import wait_until

UNET = "tiny_report.safetensors"
MODELS = {UNET: 4}
SHORT = "tiny_report_cut_off.safetensors"
HEADLINE = "() => document.querySelector('.parallel-headline').textContent"
PHASE = """() => app.graph.nodes.find(n => n.comfyClass === 'ParallelSampler').widgets.find(
  w => w.name.includes('text-preview'))?.value || ''"""
LEFT = "() => document.querySelector('.parallel-left')?.textContent ?? ''"
ROWS = "() => document.querySelectorAll('.parallel-candidates tr').length"
# Lists each device and its number of steps with bars of all three parts.
TIMELINE = """() => [...document.querySelectorAll('.parallel-timeline .row')].flatMap(row => [
  row.querySelector('span').textContent,
  [...row.querySelectorAll('g')].filter(g => g.querySelectorAll('rect').length === 3).length])"""


def _wait_for_problem(page, but: str = "") -> str:
    """Waits until the panel says what went wrong, in other words than `but`, and returns them."""
    found = "document.querySelector('.parallel-report.problem')?.textContent ?? ''"
    page.wait_for_function(f"but => ({found}) && ({found}) !== but", arg=but)
    return page.evaluate(REPORT)


def _run(page, **sampler) -> None:
    set_widgets(page, "ParallelSampler", **sampler)
    run(page)


def test_a_run_that_goes_on_or_ended_badly_shows_nothing_of_the_one_before(page, measuring):
    show_prompt(page, one_sampler(UNET, sampler={"cfg": 3.0}).prompt, "ParallelSampler")
    wait_for_report(page, "After a run")
    _run(page, seed=1)
    wait_for_report(page, "strategy: ")
    assert page.evaluate(ROWS) > 1
    said = (
        r"2 devices \(.+\) · [\d.e-]+ s per step · (.+ one device|not compared) · same picture as one device"
    )
    assert re.fullmatch(rf"{said}|one device · [\d.e-]+ s per step", page.evaluate(HEADLINE))

    assert page.evaluate(TIMELINE) == ["cpu:0", 3, "cpu:1", 3]
    assert page.evaluate(PHASE) == ""  # the panel already shows the result

    _run(page, seed=2, steps=4000)
    wait_for_report(page, "Running")
    assert page.evaluate(ROWS) == 0 and page.evaluate(HEADLINE) == "" and page.evaluate(TIMELINE) == []
    page.wait_for_function(PHASE)
    page.wait_for_function(f"() => /^step [0-9]+ of 4000 · about [0-9]+ (s|min|h) left$/.test(({LEFT})())")
    wait_until(lambda: len(queued(measuring[0])) == 1)
    page.reload()
    wait_for_report(page, "Running")
    page.evaluate("() => app.api.interrupt()")
    wait_for_report(page, "The latest run was cancelled.")
    wait_for(page, PHASE, "")
    assert page.evaluate(LEFT) == ""
    show_again(page)
    wait_for_report(page, "The latest run was cancelled")
    assert page.evaluate(ROWS) == 0

    _run(page, seed=3, steps=2)
    wait_for_report(page, "strategy: ")
    set_widgets(page, "TestLatent", channels=5, draw=1)  # a latent that does not fit the model
    _run(page, seed=4)
    failed = _wait_for_problem(page)
    assert len(failed) > 30 and failed != "The latest run failed."
    set_widgets(page, "TestLatent", channels=16, draw=-1)
    set_widgets(page, "ParallelSampler", steps=0)
    page.evaluate("() => app.queuePrompt(0, 1).catch(() => {})")
    refused = _wait_for_problem(page, but=failed)
    assert refused.startswith("ComfyUI refused") and "steps" in refused
    # The loader refuses the file, so the sampler never starts.
    folder = measuring[0].server.base_directory / "models" / "diffusion_models"
    (folder / SHORT).write_bytes((folder / UNET).read_bytes()[:100])
    set_widgets(page, "ParallelFluxLoader", unet_name=SHORT)
    _run(page, seed=4, steps=2)
    assert _wait_for_problem(page, but=refused) != "The latest run failed."
    assert page.evaluate(ROWS) == 0

    set_widgets(page, "ParallelFluxLoader", unet_name=UNET)
    _run(page, seed=3)  # ComfyUI has every output in its cache
    wait_for_report(page, "strategy: ")
