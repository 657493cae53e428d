"""In a real browser: a click on a row of the candidates sets its strategy. One click measures all rows without a time
and leaves the graph, its report and its seed unchanged; a run ends that."""

from __future__ import annotations

from pages import (
    REPORT,
    command,
    ended,
    one_sampler,
    queued,
    run,
    show_again,
    show_prompt,
    wait_for,
    widgets,
    words_of,
)
from waiting import wait_until

UNET = "tiny_candidates.safetensors"
STOPPED = "tiny_stopped.safetensors"  # measured separately
MODELS = {UNET: 8, STOPPED: 10}
ROWS = """() => [...document.querySelectorAll('.parallel-candidates tr')].map(row => ({
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


def _run(page, unet: str = UNET) -> list[dict]:
    """Runs a sampler with a selector on auto and returns the candidates' rows."""
    show_prompt(page, one_sampler(unet, sampler={"steps": 6, "cfg": 3.0}).prompt, "StrategySelector")
    page.wait_for_selector(".parallel-strategy")
    run(page)
    page.wait_for_selector(".parallel-candidates tr[aria-current]")
    return page.evaluate(ROWS)


def _values(page) -> dict:
    return widgets(page, "StrategySelector") | widgets(page, "ParallelSampler")


def _untimed(rows: list[dict]) -> list[str]:
    return [row["name"] for row in rows if row["possible"] and row["time"] == "not tried"]


def _measure(page, rest: list[str]) -> None:
    name = words_of()["measure_rest"].replace("{count}", str(len(rest)))
    page.get_by_role("button", name=name).dispatch_event("click")


def test_the_rest_is_measured_and_a_row_applies_its_strategy(page, measuring):
    rows = _run(page)
    rest = _untimed(rows)
    assert "Ring 2" in rest and "one device" in rest and rows[0]["name"] == "CFG 2"
    report, before = page.evaluate(REPORT), _values(page)

    _measure(page, rest)
    known = f"() => ({ROWS})().every(r => !r.possible || r.time.includes('measured'))"
    page.wait_for_function(known, timeout=180_000)
    assert {row["name"] for row in page.evaluate(ROWS)} == {row["name"] for row in rows}
    measured = [nodes["measured"]["inputs"] for nodes in ended(measuring[0]) if "measured" in nodes]
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
    comfy = measuring[0]
    rest = _untimed(_run(page, STOPPED))
    assert len(rest) > 2
    wait_until(lambda: not queued(comfy))
    before = len(ended(comfy))

    def kinds() -> list[str]:
        """Returns the kinds of the prompts that have ended since."""
        return ["measured" if "measured" in nodes else "run" for nodes in ended(comfy)[before:]]

    _measure(page, rest)
    page.wait_for_selector(f".parallel-candidates p:has-text('1 of {len(rest)}')")
    wait_until(lambda: kinds() or any("measured" in nodes for nodes in queued(comfy)))
    run(page)
    wait_until(lambda: "run" in kinds())
    wait_until(lambda: not queued(comfy))
    assert kinds()[-1] == "run" and kinds().count("run") == 1
    assert page.evaluate(f"() => ({ROWS})().some(row => row.time === 'not tried')")
    page.get_by_role("button", name="Measure the rest").wait_for()


def test_a_prompt_that_was_taken_out_of_the_queue_is_not_waited_for(page):
    assert page.evaluate(GONE)["end"] == ""
