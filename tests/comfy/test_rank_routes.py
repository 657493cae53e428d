"""The routes for the ranks get valid and invalid requests, from ComfyUI's page and from other sites."""

from __future__ import annotations

import itertools
import json
import random

import pytest

from graphs import Graph

ROUTE = "/parallel_sampling/ranks"
WATCH = "/parallel_sampling/watch"
ACTIONS = ("sleep", "wake", "restart", "stop", "reset")
ELSEWHERE = ({"Origin": "https://elsewhere.example"}, {"Origin": "null"}, {"Sec-Fetch-Site": "cross-site"})
GROUP = {"devices": ["cpu:0", "cpu:1"]}
_SEEDS = itertools.count(1)  # a new seed per run, so that no cached output answers


@pytest.fixture
def warm(measuring):
    """A ComfyUI whose ranks hold a model."""
    comfy, _ = measuring
    unet = comfy.write_flux("tiny_ranks.safetensors", single_blocks=5)
    graph = Graph()
    loader = graph.parallel_loader(unet, "cpu:2", ulysses=2)
    latent = graph.parallel_sampler(loader, *graph.request(), seed=next(_SEEDS))
    comfy.sample(graph.prompt, latent)
    return comfy


def _group(comfy) -> dict:
    (group,) = comfy.groups()
    return group


def test_each_button_does_what_it_says_and_refuses_where_it_makes_no_sense(warm):
    def press(action):
        status, said = warm.ask(f"{ROUTE}/{action}", GROUP)
        return status, said.get("error", "") if status != 200 else said["groups"][0]["state"]

    held = _group(warm)
    assert (held["state"], held["model"], len(held["ranks"])) == ("ready", "tiny_ranks.safetensors", 2)
    assert all(rank["weight_bytes"] > 0 and rank["pid"] for rank in held["ranks"])
    assert press("wake") == (409, "the processes are awake")
    assert press("sleep") == (200, "asleep")
    assert press("wake") == (200, "ready") and _group(warm)["model"] == "tiny_ranks.safetensors"
    pids = {rank["pid"] for rank in held["ranks"]}
    assert press("restart") == (200, "ready")
    assert not pids & {rank["pid"] for rank in _group(warm)["ranks"]}
    assert press("stop") == (200, "down")
    assert press("stop")[0] == press("reset")[0] == 409
    assert warm.ask(f"{ROUTE}/stop", {"devices": ["cpu:0"]})[0] == 404


def test_nothing_from_elsewhere_and_no_nonsense_does_harm(warm):
    """Other sites, other methods and bodies that are too long or random get a 4xx, and the ranks stay as they are."""
    before = _group(warm)
    paths = [f"{ROUTE}/{action}" for action in ACTIONS] + [WATCH]
    watch = {"client_id": "nobody", "looking": True, "anew": True}
    for path, body in itertools.product(paths, (GROUP, watch)):
        for headers in ELSEWHERE:
            assert warm.ask(path, body, **headers)[0] == 403
        for method in ("GET", "PUT", "DELETE"):
            assert warm.ask(path, body, method=method)[0] in (404, 405)
    assert warm.ask(WATCH, watch)[0] == 409  # this page has no websocket

    draw = random.Random(7)

    def anything(depth=0):
        kinds = [None, True, -1, 1e300, "", "cpu:0", "\x00\u2028😀", "x" * 300]
        if depth < 3:
            kinds += [
                [anything(depth + 1) for _ in range(draw.randrange(4))],
                {
                    draw.choice(["devices", "client_id", "looking", "anew", "x"]): anything(depth + 1)
                    for _ in range(3)
                },
            ]
        return draw.choice(kinds)

    bodies = [json.dumps(anything()).encode() for _ in range(60)]
    bodies += [draw.randbytes(draw.randrange(64)) for _ in range(20)]
    bodies += [b"", b"{", b"[" * 900, b'"\xff"', b"1" * 900, b"NaN", b" " * 5000, b"[" * 100_000]
    bodies += [
        b'{"devices": ["cpu:0", "cpu:1"], "devices": []}',
        b'{"client_id": "\\ud800", "looking": true, "anew": true}',
    ]
    for body in bodies:
        for path in draw.sample(paths, 3):
            status, said = warm.ask(path, body)
            assert 400 <= status < 500 and said["error"], (path, body)
    after = _group(warm)
    assert after["state"] == "ready"
    assert [rank["pid"] for rank in after["ranks"]] == [rank["pid"] for rank in before["ranks"]]
