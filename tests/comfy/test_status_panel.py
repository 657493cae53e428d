"""The status panel in a real browser follows the ranks from start to end and is drawn in each state and theme."""

from __future__ import annotations

import os
import re
import signal

from pages import TOAST_TITLE, one_sampler, open_by, run, send, show_prompt, toast, wait_for_extensions

UNET = "tiny_panel_status.safetensors"
MODELS = {UNET: 3}
# Records, in order, every text that elements of `selector` show from now on.
RECORD = """(selector) => {
  window.recorded = [];
  const look = () => {
    for (const found of document.querySelectorAll(selector)) {
      const text = found.innerText.trim();
      if (text && recorded.at(-1) !== text) recorded.push(text);
    }
  };
  new MutationObserver(look).observe(document.body, {subtree: true, childList: true, characterData: true});
}"""
FASTER = """() => {
  window.realInterval = window.setInterval;
  window.setInterval = (act, ms) => window.realInterval(act, ms / 20);
}"""
# Lists the elements that are wider than the panel or are cut off at the side.
STICKS_OUT = """() => {
  const panel = document.querySelector('.parallel-status');
  const right = Math.min(panel.getBoundingClientRect().right, window.innerWidth);
  return [panel, ...panel.querySelectorAll('*')]
    .filter((e) => e.checkVisibility() && !e.closest('.unseen, svg'))
    .filter((e) => e.scrollWidth > e.clientWidth + 1 && e.clientWidth || e.getBoundingClientRect().right > right + 1)
    .map((e) => `${e.tagName}.${e.className}: ${e.innerText?.slice(0, 40)}`);
}"""


def _open(page):
    return open_by(page, "status_panel", "Status of Parallel Sampling", role="region")


def test_the_panel_follows_ranks_from_start_to_end(measuring, page):
    frames: list[str] = []  # those that tell the panel something

    def hear(frame: str | bytes) -> None:
        if "parallel_sampling.status" in str(frame)[:60]:
            frames.append(frame)

    def follow(socket) -> None:
        socket.on("framereceived", hear)

    page.on("websocket", follow)

    def wait_for(words: str) -> None:
        card.locator(".state").get_by_text(words, exact=True).wait_for()

    def press(name: str, then: str) -> None:
        card.get_by_role("button", name=name, exact=True).click()
        wait_for(then)

    # A job that this page queues, and whose progress bars it shows.
    graph = one_sampler(UNET, sampler={"steps": 20}, ulysses=2)
    for node in graph.prompt.values():
        if node["class_type"] == "TestLatent":
            node["inputs"] |= {"width": 48, "height": 48}  # for a step that takes some time
    show_prompt(page, graph.prompt, "ParallelSampler")
    panel = _open(page)
    card = panel.locator(".parallel-group").first
    page.evaluate(RECORD, f".parallel-group .state, .parallel-bars li, {TOAST_TITLE}")
    run(page)
    page.wait_for_function("() => recorded.some(t => /^step [1-9]\\d* of 20 · about \\d+ s left$/.test(t))")
    os.kill(measuring.groups()[0]["ranks"][0]["pid"], signal.SIGKILL)  # the job continues on new ranks
    page.wait_for_function("() => recorded.includes('Processes started again')")
    toast(page, "after: process 0 failed: killed by SIGKILL").wait_for()
    card = panel.get_by_label("Processes on cpu:0, cpu:1")
    wait_for("ready")
    page.wait_for_function("() => !document.querySelector('.parallel-bars')?.children.length")
    seen = page.evaluate("recorded")
    bars = {text.split()[0] for text in seen if re.fullmatch(r"cpu:[01] step \d+ of 20", text)}
    assert bars == {"cpu:0", "cpu:1"}
    assert UNET in card.inner_text() and "weights" in card.inner_text() and " per step" in card.inner_text()
    card.locator("button[title='Not now: the processes are awake']").wait_for()  # after a moment

    press("Sleep", "asleep")
    press("Wake", "ready")
    # The panel loses its websocket, then its page, and recovers each time.
    page.evaluate("() => app.api.socket.close()")
    press("Sleep", "asleep")
    page.reload()
    wait_for_extensions(page)
    panel = _open(page)
    card = panel.get_by_label("Processes on cpu:0, cpu:1")
    wait_for("asleep")
    assert frames

    # The panel shows why a rank died and can start it again.
    page.evaluate(RECORD, TOAST_TITLE)
    os.kill(measuring.groups()[0]["ranks"][1]["pid"], signal.SIGKILL)
    wait_for("failed")
    assert "process 1 failed" in card.locator(".reason").inner_text()
    press("Start", "ready")
    page.wait_for_function("() => recorded.includes('Processes started')")
    assert page.evaluate("recorded.filter(t => t === 'Processes started').length") == 1
    press("Stop", "not started")

    # While no panel is open, nothing is sent.
    with page.expect_response("**/parallel_sampling/watch"):
        page.evaluate("() => app.extensionManager.sidebarTab.toggleSidebarTab('parallel-sampling')")
    panel.wait_for(state="detached")
    frames.clear()
    page.wait_for_timeout(2000)  # twice the period of the feed
    assert frames == []
    page.remove_listener("websocket", follow)


def _gpu(rank: int, **changes) -> dict:
    gauge = {
        "name": "NVIDIA GeForce RTX 4090 Laptop GPU with a long name",
        "total_bytes": 24 * 2**30,
        "free_bytes": (9 - rank) * 2**30,
        "utilisation": 0.97,
        "temperature": 71,
        "power": 402.5,
        "power_limit": 450.0,
        "shared": False,
    }
    return {
        "device": f"cuda:{rank}",
        "words": "",
        "progress": None,
        "rank": rank,
        "pid": 41000 + rank,
        "weight_bytes": 12 * 2**30,
        "working_bytes": 2**30,
        "bytes_sent": 345 * 2**30,
        "gauge": gauge,
    } | changes


LONG_NAME = "flux1-dev-a-very-long-name-of-a-fine-tune-without-any-spaces-in-it-fp8_e4m3fn.safetensors"


def _case(devices: list[int], state: str, said: str, reason: str = "", **rank) -> dict:
    enabled = {"ready": {"sleep", "restart", "stop"}, "broken": {"reset"}, "failed": {"restart"}}.get(
        state, set()
    )
    buttons = ("sleep", "wake", "restart", "stop", "reset")
    broken = "they failed too often; press Allow restarts first"
    why = broken if state == "broken" else "a prompt is using the processes"
    return {
        "devices": [f"cuda:{i}" for i in devices],
        "state": state,
        "words": said,
        "reason": reason,
        "model": LONG_NAME,
        "models": [LONG_NAME, "wan2.2_t2v_low_noise_14B_fp8_scaled.safetensors"],
        "step_seconds": [0.52, 0.5, 0.55, 0.51, 0.9, 0.52, 0.5],
        "why_not": {name: "" if name in enabled else why for name in buttons},
        "ranks": [_gpu(i, **rank) for i in devices],
    }


STATES = {
    "groups": [
        _case([0, 1], "running", "sampling 12/28", words="step 12 of 28", progress=0.43),
        _case([2, 3], "running", "loading 43 %", words="loading 43 %", progress=0.43),
        _case([4], "failed", "failed", "process 0 failed: killed by SIGKILL", pid=None, weight_bytes=0),
        _case([5], "broken", "broken", "process 0 failed: " + "CUDA_ERROR_ILLEGAL_ADDRESS" * 4, pid=None),
    ],
    "left_out": ["cuda:7"],
    "settings": ["the setting default_devices is 'cuda:99': there is no such GPU; all counts"],
}


def test_each_state_is_drawn_in_both_themes_and_nothing_sticks_out(page, set_setting):
    # The panel gets only the states of this test, and says every quarter second that it looks.
    page.route("**/parallel_sampling/watch", lambda route: route.fulfill(json={"seconds": 15}))
    page.evaluate(FASTER)
    panel = _open(page)
    page.evaluate("() => { window.setInterval = window.realInterval; }")
    send(page, "status", STATES)
    cards = panel.locator(".parallel-group")
    assert cards.count() == 4
    assert "CUDA_ERROR" in cards.nth(3).locator(".reason").inner_text()
    words = cards.nth(0).inner_text()
    assert all(
        part in words for part in ("12/28", "97 % busy", "71 °C", "403 of 450 W", "345.0 GiB", "520 ms")
    )
    assert "cuda:99" in panel.locator(".settings").inner_text()
    assert panel.locator(".left-out").inner_text().startswith("cuda:7 left out")

    # If ranks failed too often, Sleep explains why it does nothing and what to do first.
    assert "failed too often" in cards.nth(3).get_by_role("button", name="Sleep").get_attribute("title")

    # The keyboard reaches each button; a disabled one explains why and does nothing.
    cards.nth(0).get_by_role("button", name="Sleep").focus()
    send(page, "status", STATES)  # an update keeps the focus
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Wake"
    assert not cards.nth(0).get_by_role("button", name="Wake").is_enabled()
    assert cards.nth(3).get_by_role("button", name="Allow restarts").is_enabled()
    page.keyboard.press("Enter")
    assert panel.get_by_role("alert").count() == 0

    for theme in ("dark", "light"):
        set_setting("Comfy.ColorPalette", theme)
        page.set_viewport_size({"width": 320, "height": 900})
        assert page.evaluate(STICKS_OUT) == []

    # A toast that stays, as the server sends it.
    said = {"summary": "The processes failed too often", "detail": "Allow restarts"}
    send(page, "toast", {"severity": "error", "life": None, **said})
    toast(page, said["summary"]).wait_for()

    # ComfyUI stops answering and comes back.
    page.unroute("**/parallel_sampling/watch")
    page.route("**/parallel_sampling/watch", lambda route: route.abort())
    panel.get_by_text("ComfyUI does not answer").wait_for()
    page.unroute("**/parallel_sampling/watch")
    panel.get_by_text("ComfyUI does not answer").wait_for(state="hidden")


def test_before_a_first_run_the_machine_is_there_and_eight_gpus_are_seen_at_once(page):
    page.route("**/parallel_sampling/watch", lambda route: route.fulfill(json={"seconds": 15}))
    panel = _open(page)
    idle = {"device": "cuda:7", "name": "NVIDIA H100", "total_bytes": 80 * 2**30, "free_bytes": 70 * 2**30}
    told = {
        "groups": [_case(list(range(7)), "down", "not started", pid=None, weight_bytes=0, working_bytes=0)],
        "left_out": [],
        "settings": [],
        "machine": "8 × NVIDIA H100 (80 GiB), slowest path NVSWITCH.",
        "others": [{**idle, "users": ["blender (process 77): 9.50 GiB"], "busy": False}],
    }
    send(page, "status", told)
    words = panel.inner_text()
    assert "No processes yet" in words and "8 × NVIDIA H100 (80 GiB), slowest path NVSWITCH." in words
    assert words.count("of 24.0 GiB") == 7 and all(f"process {i} · cuda:{i}" in words for i in range(7))
    assert "cuda:7 NVIDIA H100 · free 70 GiB of 80 GiB · blender (process 77): 9.50 GiB" in words

    told |= {"groups": [_case(list(range(8)), "ready", "ready")], "others": []}
    send(page, "status", told)
    panel.get_by_text("process 7 · cuda:7").wait_for()
    inside = "e => [e.scrollHeight, e.clientHeight]"
    scrolls, seen = panel.evaluate(inside)
    assert scrolls <= seen + 1, (scrolls, seen)
    assert page.evaluate(STICKS_OUT) == []
