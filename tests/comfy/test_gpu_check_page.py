"""The GPU check's button in a real browser: what it says first, its progress, its report, and its end."""

from __future__ import annotations

import json
import re

import pytest

from scripted import processes_with
from waiting import wait_until

COMMAND = "() => void app.extensionManager.command.execute('parallel_sampling.gpu_check')"
ROUTE = "**/parallel_sampling/gpu_check"


@pytest.fixture
def dialog(page):
    page.evaluate(COMMAND)
    found = page.get_by_role("dialog", name="GPU check of Parallel Sampling")
    found.wait_for()
    return found


def test_it_says_what_it_does_first_and_shows_a_refusal_or_the_report(page, dialog):
    page.route(ROUTE, lambda route: route.fulfill(status=409, json={"error": "a prompt uses the devices"}))
    dialog.get_by_role("button", name="Run").click()
    dialog.get_by_text("a prompt uses the devices").wait_for()
    page.unroute(ROUTE)
    dialog.get_by_role("button", name="Close").click()
    page.evaluate(COMMAND)
    dialog.wait_for()
    asked = []
    lines = [
        {"line": "[1/2] device …"},
        {"markdown": "# GPU check\n\nall is well", "report": {"exit_status": 0}, "result": '{"format": 1}'},
    ]

    def answer(route):
        asked.append(route.request.method)
        route.fulfill(status=200, body="".join(json.dumps(line) + "\n" for line in lines))

    page.route(ROUTE, answer)
    assert "It takes some minutes" in dialog.inner_text() and not asked
    dialog.get_by_role("button", name="Run").click()
    page.wait_for_function(
        "() => document.querySelector('dialog.parallel-doctor pre').textContent.startsWith('# GPU')"
    )
    assert asked == ["POST"] and "all is well" in dialog.inner_text()
    saved = {}
    for name in ("Save Markdown", "Save JSON", "Save a result to share"):
        with page.expect_download() as download:
            dialog.get_by_role("button", name=name).click()
        saved[download.value.suggested_filename] = download.value.path().read_text()
    assert list(saved) == ["gpu-check.md", "gpu-check.json", "result.json"]
    assert json.loads(saved["gpu-check.json"]) == {"exit_status": 0}
    assert saved["result.json"] == '{"format": 1}'


def test_closing_the_dialog_ends_the_check(page, dialog, measuring):
    dialog.get_by_role("button", name="Run").click()
    dialog.get_by_text(re.compile(r"\[1/\d+\] installation")).wait_for()
    assert processes_with("--gpu", str(measuring[0].server.pid))
    page.keyboard.press("Escape")
    dialog.wait_for(state="detached")
    wait_until(lambda: not processes_with("--gpu", str(measuring[0].server.pid)), 120)
