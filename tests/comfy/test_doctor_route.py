"""The doctor's button in a real browser: only ComfyUI's own page may start the doctor, and only one runs at a time."""

from __future__ import annotations

import pytest

ROUTE = "/parallel_sampling/doctor"


def test_the_button_shows_what_the_doctor_says_and_a_second_one_waits(page, measuring, tmp_path):
    page.evaluate("() => void app.extensionManager.command.execute('parallel_sampling.doctor')")
    dialog = page.get_by_role("dialog", name="Doctor of Parallel Sampling")
    dialog.wait_for(timeout=60_000)
    assert "about half a minute" in dialog.inner_text()
    status, said = measuring[0].ask(ROUTE)
    assert (status, said["error"]) == (409, "the doctor is examining this machine already")
    page.wait_for_function(
        "() => document.querySelector('dialog.parallel-doctor pre').textContent.includes('Software')",
        timeout=200_000,
    )
    text = dialog.inner_text()
    page.screenshot(path=tmp_path / "doctor.png")
    assert "torch" in text and "Sampling" in text and str(measuring[0].server.base_directory) not in text
    page.keyboard.press("Escape")
    dialog.wait_for(state="detached", timeout=60_000)


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "https://elsewhere.example"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Origin": "null"},
    ],
    ids=["another page", "a form elsewhere", "a file"],
)
def test_other_pages_may_not_ask(measuring, headers):
    assert measuring[0].ask(ROUTE, **headers)[0] == 403


def test_only_a_post_starts_it(measuring):
    assert measuring[0].ask(ROUTE, method="GET")[0] in (404, 405)
