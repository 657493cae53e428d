"""The ranks in ComfyUI's menu, in a real browser: their state, sleep, stop; for ComfyUI's own page only."""

from __future__ import annotations

import itertools
import json
import urllib.error
import urllib.request

import pytest
from graphs import Graph

ROUTE = "/parallel_sampling/ranks"
_SEEDS = itertools.count(1)  # another seed, another run


@pytest.fixture
def warm(measuring):
    """Ranks that hold a model."""
    comfy, _ = measuring
    unet = comfy.write_flux("tiny_ranks.safetensors", single_blocks=5)
    graph = Graph()
    loader = graph.parallel_loader(unet, "cpu:2", ulysses=2)
    latent = graph.parallel_sampler(loader, graph.text(1), graph.text(2), graph.latent(), seed=next(_SEEDS))
    comfy.sample(graph.prompt, latent)
    return comfy


def _ask(comfy, path: str = "", method: str = "GET", **headers: str) -> tuple[int, dict]:
    request = urllib.request.Request(comfy.server.url + ROUTE + path, method=method, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read() or b"{}")


def _states(comfy) -> list[str]:
    return [group["state"] for group in _ask(comfy)[1]["groups"]]


def test_the_dialog_shows_the_ranks_and_puts_them_to_sleep(warm, page, tmp_path):
    page.evaluate("() => void app.extensionManager.command.execute('parallel_sampling.ranks')")
    dialog = page.get_by_role("dialog", name="Ranks of Parallel Sampling")
    dialog.get_by_text("tiny_ranks.safetensors").wait_for(timeout=20_000)
    assert "cpu:0, cpu:1" in dialog.inner_text() and "ready" in dialog.inner_text()
    page.screenshot(path=tmp_path / "ranks.png")
    dialog.get_by_role("button", name="Sleep").click()
    dialog.get_by_text("asleep").wait_for(timeout=20_000)
    assert _states(warm) == ["asleep"]
    page.keyboard.press("Escape")
    dialog.wait_for(state="detached", timeout=10_000)


def test_stop_ends_the_ranks_and_the_next_prompt_starts_them(warm):
    assert _ask(warm)[1]["groups"] == [
        {"devices": ["cpu:0", "cpu:1"], "state": "ready", "ranks": 2, "model": "tiny_ranks.safetensors"}
    ]
    status, said = _ask(warm, "/stop", "POST")
    assert status == 200 and [group["ranks"] for group in said["groups"]] == [0]
    assert _ask(warm, "/reset", "POST")[0] == 200


@pytest.mark.parametrize("action", ["/sleep", "/stop", "/reset"])
def test_other_pages_and_other_methods_do_nothing(warm, action):
    assert _ask(warm, action, "POST", Origin="https://elsewhere.example")[0] == 403
    assert _ask(warm, action)[0] in (404, 405)
    assert _states(warm) == ["ready"]
