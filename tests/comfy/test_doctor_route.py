"""The buttons of the doctor and the GPU check in a real browser: what they say first, and their progress and end."""

from __future__ import annotations

import json

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
    status, said = measuring.ask(ROUTE)
    assert (status, said["error"]) == (409, "the doctor is examining this machine already")
    page.wait_for_function(f"() => ({SHOWN})().includes('\\n')")
    assert processes_with("--json", str(measuring.server.pid))
    page.keyboard.press("Escape")
    dialog.wait_for(state="detached")
    wait_until(lambda: not processes_with("--json", str(measuring.server.pid)))

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


GPU_ROUTE = "**/parallel_sampling/gpu_check"


def _open(page):
    return open_by(page, "gpu_check", "GPU check of Parallel Sampling")


def test_it_says_what_it_does_first_shows_a_refusal_or_the_report_and_ends_with_its_dialog(page):
    page.route(
        GPU_ROUTE, lambda route: route.fulfill(status=409, json={"error": "a prompt uses the devices"})
    )
    dialog = _open(page)
    dialog.get_by_role("button", name="Run").click()
    dialog.get_by_text("a prompt uses the devices").wait_for()
    page.unroute(GPU_ROUTE)
    dialog.get_by_role("button", name="Close").click()
    dialog = _open(page)
    asked = []
    lines = [
        {"line": "[1/2] device …"},
        {"markdown": "# GPU check\n\nall is well", "report": {"exit_status": 0}, "result": '{"format": 1}'},
    ]

    def answer(route):
        asked.append(route.request.method)
        route.fulfill(body="".join(json.dumps(line) + "\n" for line in lines))

    page.route(GPU_ROUTE, answer)
    assert "It takes some minutes" in dialog.inner_text() and not asked
    dialog.get_by_role("button", name="Run").click()
    dialog.get_by_text("all is well").wait_for()
    assert asked == ["POST"] and dialog.locator("pre").inner_text().startswith("# GPU")
    saved = {}
    for name in ("Save Markdown", "Save JSON", "Save a result to share"):
        with page.expect_download() as download:
            dialog.get_by_role("button", name=name).click()
        saved[download.value.suggested_filename] = download.value.path().read_text()
    assert list(saved) == ["gpu-check.md", "gpu-check.json", "result.json"]
    assert json.loads(saved["gpu-check.json"]) == {"exit_status": 0}
    assert saved["result.json"] == '{"format": 1}'

    dialog.get_by_role("button", name="Close").click()
    page.unroute(GPU_ROUTE)
    page.route(GPU_ROUTE, lambda route: None)  # it never answers
    _open(page).get_by_role("button", name="Run").click()
    with page.expect_event("requestfailed"):
        page.keyboard.press("Escape")
