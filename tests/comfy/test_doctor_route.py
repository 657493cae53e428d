"""The doctor's button in a real browser: only ComfyUI's own page may start the doctor, and only one runs at a time."""

from __future__ import annotations

import json

import pytest

from pages import open_by
from parallel_backend.commands.doctor.report import Report
from parallel_backend.wire.checks.findings import Finding
from scripted import processes_with
from waiting import wait_until

ROUTE = "/parallel_sampling/doctor"
TITLE = "Doctor of Parallel Sampling"
SHOWN = "() => document.querySelector('dialog.parallel-doctor pre').textContent"
# Hides what a page over plain HTTP from elsewhere does not have, and notes copies that reach ComfyUI's page.
PLAIN_HTTP = """() => {
  Object.defineProperty(navigator, 'clipboard', { value: undefined, configurable: true });
  document.addEventListener('copy', () => { window.passed = true; }, { once: true });
}"""
COPIED = """async () => {
  delete navigator.clipboard;
  return [await navigator.clipboard.readText(), window.passed ?? false];
}"""
FOUND = Report(
    (
        Finding("torch", "ok", "2.7.1", group="Software"),
        Finding("all-reduce", "broken", "it hangs", "restart", ("cpu:0 and cpu:1",), group="Links"),
    )
)


def test_the_button_shows_what_the_doctor_says_and_a_second_one_waits(page, measuring):
    """tests/commands/doctor/test_doctor.py has a whole examination."""
    dialog = open_by(page, "doctor", TITLE)
    assert "about half a minute" in dialog.inner_text()
    status, said = measuring[0].ask(ROUTE)
    assert (status, said["error"]) == (409, "the doctor is examining this machine already")
    page.wait_for_function(f"() => ({SHOWN})().includes('\\n')")
    assert processes_with("--json", str(measuring[0].server.pid))
    page.keyboard.press("Escape")
    dialog.wait_for(state="detached")
    wait_until(lambda: not processes_with("--json", str(measuring[0].server.pid)))

    lines = [{"line": "Software"}, {"report": FOUND.as_dict()}]
    body = "".join(json.dumps(line) + "\n" for line in lines)
    page.route(f"**{ROUTE}", lambda route: route.fulfill(body=body))
    dialog = open_by(page, "doctor", TITLE)
    page.wait_for_function(f"() => ({SHOWN})().includes('broken')")
    words = dialog.inner_text()
    assert "Software\n  ok · torch: 2.7.1\n\nLinks\n  broken · all-reduce: it hangs\n" in words
    assert "    cpu:0 and cpu:1\n    → restart\n" in words and FOUND.summary in words
    page.evaluate(PLAIN_HTTP)
    dialog.get_by_role("button", name="Copy").click()
    page.context.grant_permissions(["clipboard-read"])
    assert page.evaluate(COPIED) == [page.evaluate(SHOWN), False]


@pytest.mark.parametrize(
    "headers",
    [{"Origin": "https://elsewhere.example"}, {"Sec-Fetch-Site": "cross-site"}, {"Origin": "null"}],
    ids=["another page", "a form elsewhere", "a file"],
)
def test_other_pages_may_not_ask(measuring, headers):
    assert measuring[0].ask(ROUTE, **headers)[0] == 403


def test_only_a_post_starts_it(measuring):
    assert measuring[0].ask(ROUTE, method="GET")[0] in (404, 405)
