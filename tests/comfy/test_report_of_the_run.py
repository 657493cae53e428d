"""In a real browser, nodes show only the latest run, however it ended or if it goes on.

A click on a row of its candidates sets the row's strategy. One click measures all rows without a time and leaves the
graph, its report and its seed unchanged; a run ends that.
"""

from __future__ import annotations

import re

from pages import (
    REPORT,
    command,
    ended,
    one_sampler,
    queued,
    run,
    set_widgets,
    show_again,
    show_prompt,
    wait_for,
    wait_for_report,
    widgets,
    words_of,
)
from waiting import wait_until

UNET = "tiny_report.safetensors"
MEASURED, STOPPED = "tiny_candidates.safetensors", "tiny_stopped.safetensors"  # each measured separately
MODELS = {UNET: 4, MEASURED: 8, STOPPED: 10}
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
    wait_until(lambda: len(queued(measuring)) == 1)
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
    folder = measuring.models()
    (folder / SHORT).write_bytes((folder / UNET).read_bytes()[:100])
    set_widgets(page, "ParallelFluxLoader", unet_name=SHORT)
    _run(page, seed=4, steps=2)
    assert _wait_for_problem(page, but=refused) != "The latest run failed."
    assert page.evaluate(ROWS) == 0

    set_widgets(page, "ParallelFluxLoader", unet_name=UNET)
    _run(page, seed=3)  # ComfyUI has every output in its cache
    wait_for_report(page, "strategy: ")


CANDIDATES = """() => [...document.querySelectorAll('.parallel-candidates tr')].map(row => ({
  name: row.querySelector('button').textContent.replace('→ ', ''), time: row.cells[1].innerText.trim(),
  possible: !row.classList.contains('impossible') }))"""
# Waits with lib/branch.js for a prompt that ComfyUI's queue does not have, and returns its end.
GONE = """async () => {
  const { run } = await import('/extensions/comfyui-parallel-sampling/lib/branch.js');
  const { queuePrompt } = app.api;
  app.api.queuePrompt = async () => ({ prompt_id: 'taken out' });
  const waiting = run({}, {});
  app.api.queuePrompt = queuePrompt;
  await new Promise(setTimeout);
  app.api.dispatchCustomEvent('status', null);
  return Promise.race([waiting, new Promise(resolve => setTimeout(resolve, 20_000, { end: 'none' }))]);
}"""

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


def _run_auto(page, unet: str) -> list[dict]:
    """Runs a sampler with a selector on auto and returns the candidates' rows."""
    show_prompt(page, one_sampler(unet, sampler={"steps": 6, "cfg": 3.0}).prompt, "StrategySelector")
    page.wait_for_selector(".parallel-strategy")
    run(page)
    page.wait_for_selector(".parallel-candidates tr[aria-current]")
    return page.evaluate(CANDIDATES)


def _values(page) -> dict:
    return widgets(page, "StrategySelector") | widgets(page, "ParallelSampler")


def _untimed(rows: list[dict]) -> list[str]:
    return [row["name"] for row in rows if row["possible"] and row["time"] == "not tried"]


def _measure(page, rest: list[str]) -> None:
    name = words_of()["measure_rest"].replace("{count}", str(len(rest)))
    page.get_by_role("button", name=name).dispatch_event("click")


def test_the_rest_is_measured_and_a_row_applies_its_strategy(page, measuring):
    rows = _run_auto(page, MEASURED)
    rest = _untimed(rows)
    assert "Ring 2" in rest and "one device" in rest and rows[0]["name"] == "CFG 2"
    report, before = page.evaluate(REPORT), _values(page)

    _measure(page, rest)
    known = f"() => ({CANDIDATES})().every(r => !r.possible || r.time.includes('measured'))"
    page.wait_for_function(known, timeout=180_000)
    assert {row["name"] for row in page.evaluate(CANDIDATES)} == {row["name"] for row in rows}
    measured = [nodes["measured"]["inputs"] for nodes in ended(measuring) if "measured" in nodes]
    assert [inputs["steps"] for inputs in measured] == [4] * len(rest)
    assert page.evaluate(REPORT) == report and _values(page) == before
    assert before["mode"] == "auto"
    assert page.get_by_role("button", name="Measure").count() == 0

    page.get_by_role("button", name="Ring 2", exact=True).dispatch_event("click")
    assert _values(page) == {**before, "mode": "manual", "ring_degree": 2}
    command(page, "Comfy.Undo")
    wait_until(lambda: _values(page)["mode"] == "auto")
    assert _values(page) == before
    show_again(page)  # the measurements do not count as runs of this graph's sampler
    wait_for(page, REPORT, report)


def test_run_ends_a_measurement_and_comes_next(page, measuring):
    rest = _untimed(_run_auto(page, STOPPED))
    assert len(rest) > 2
    wait_until(lambda: not queued(measuring))
    before = len(ended(measuring))

    def kinds() -> list[str]:
        """Returns the kinds of the prompts that have ended since."""
        return ["measured" if "measured" in nodes else "run" for nodes in ended(measuring)[before:]]

    _measure(page, rest)
    page.wait_for_selector(f".parallel-candidates p:has-text('1 of {len(rest)}')")
    wait_until(lambda: kinds() or any("measured" in nodes for nodes in queued(measuring)))
    run(page)
    wait_until(lambda: "run" in kinds())
    wait_until(lambda: not queued(measuring))
    assert kinds()[-1] == "run" and kinds().count("run") == 1
    # The rows are empty from the run's start until its output reaches the page.
    page.wait_for_function(f"() => ({CANDIDATES})().some(row => row.time === 'not tried')")
    page.get_by_role("button", name="Measure the rest").wait_for()


def test_a_prompt_that_was_taken_out_of_the_queue_is_not_waited_for(page):
    assert page.evaluate(GONE)["end"] == ""
