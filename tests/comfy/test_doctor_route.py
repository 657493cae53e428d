"""The doctor behind a button: in a real browser, for ComfyUI's own page only, one at a time."""

from __future__ import annotations

import json
import urllib.error
import urllib.request

import pytest

ROUTE = "/parallel_sampling/doctor"


def _post(url: str, **headers: str) -> tuple[int, dict]:
    request = urllib.request.Request(url + ROUTE, method="POST", data=b"", headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=240) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read() or b"{}")


def test_the_button_shows_what_the_doctor_says_and_a_second_one_waits(page, measuring, tmp_path):
    url = measuring[0].server.url
    page.evaluate("() => void app.extensionManager.command.execute('parallel_sampling.doctor')")
    dialog = page.get_by_role("dialog", name="Doctor of Parallel Sampling")
    dialog.wait_for(timeout=60_000)
    assert "about half a minute" in dialog.inner_text()
    status, said = _post(url)
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
    status, _ = _post(measuring[0].server.url, **headers)
    assert status == 403


def test_only_a_post_starts_it(measuring):
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(measuring[0].server.url + ROUTE, timeout=30)
    assert refused.value.code in (404, 405)
