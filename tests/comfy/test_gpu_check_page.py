"""The GPU check's button in a real browser: what it says first, its progress, its report, and its end."""

from __future__ import annotations

import json
import re

from pages import open_by
from scripted import processes_with
from waiting import wait_until

ROUTE = "**/parallel_sampling/gpu_check"


def _open(page):
    return open_by(page, "gpu_check", "GPU check of Parallel Sampling")


def test_it_says_what_it_does_first_and_shows_a_refusal_or_the_report(page):
    page.route(ROUTE, lambda route: route.fulfill(status=409, json={"error": "a prompt uses the devices"}))
    dialog = _open(page)
    dialog.get_by_role("button", name="Run").click()
    dialog.get_by_text("a prompt uses the devices").wait_for()
    page.unroute(ROUTE)
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

    page.route(ROUTE, answer)
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


def test_closing_the_dialog_ends_the_check(page, measuring):
    dialog = _open(page)
    dialog.get_by_role("button", name="Run").click()
    dialog.get_by_text(re.compile(r"\[1/\d+\] installation")).wait_for()
    assert processes_with("--gpu", str(measuring[0].server.pid))
    page.keyboard.press("Escape")
    dialog.wait_for(state="detached")
    wait_until(lambda: not processes_with("--gpu", str(measuring[0].server.pid)), 120)
