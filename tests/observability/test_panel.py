"""The words and buttons of the status panel in each state of a group."""

import json
import time
from dataclasses import replace

import pytest

from parallel_backend.observability.gauges import Gauge
from parallel_backend.observability.panel import in_words, show_groups, show_progress, why_not
from parallel_backend.sidecar.group.lease import Phase, PhaseKind
from parallel_backend.sidecar.status import GroupStatus, RankStatus

RANKS = (
    RankStatus(False, "", 12, 0, frozenset(), 0.0, 0.5, 10, 20, 30, 0, "cuda:0", 11),
    RankStatus(False, "", 11, 0, frozenset(), 0.0, 0.25, 11, 21, 31, 1, "cuda:1", 12),
)
MODELS = ("low.safetensors", "high.safetensors")
GROUP = GroupStatus(("cuda:0", "cuda:1"), "ready", "", None, MODELS, 0, 0, (0.25, 0.5), RANKS)
NOW = 1000.0  # s, of time.monotonic()


def running(phase: Phase, step: int = 0, steps: int = 0) -> GroupStatus:
    return replace(GROUP, state="running", phase=phase, step=step, steps=steps)


def loading(seconds: float, size: int = 0, loaded: float | None = None) -> GroupStatus:
    """Returns a group whose load of `size` bytes (0 if unknown) began `seconds` ago. `loaded`: the share that each rank
    has, if not that of RANKS."""
    ranks = RANKS if loaded is None else tuple(replace(rank, loaded=loaded) for rank in RANKS)
    phase = Phase(PhaseKind.LOADING, "flux.safetensors", size, NOW - seconds)
    return replace(running(phase), ranks=ranks)


STATES = {
    "not started": replace(GROUP, state="down", ranks=()),
    "starting, about 10 s, once": replace(
        GROUP, state="starting", phase=Phase(PhaseKind.STARTING, "2 processes")
    ),
    "loading 38 % · about 7 s left": loading(4.2),
    "reading 24 GB · about 15 s left": loading(14.5, 24_000_000_000, loaded=0.5),
    "importing libraries": loading(0.0, loaded=0.0),
    "first step": running(Phase(PhaseKind.FIRST_STEP), steps=28),
    "step 0 of 28": running(
        Phase(PhaseKind.SAMPLING), steps=28
    ),  # nobody guesses the time before a step is done
    "step 12 of 28 · about 6 s left": running(Phase(PhaseKind.SAMPLING), 12, 28),
    "trying Ring 2 (2 of 3) 6/28": running(Phase(PhaseKind.TRYING, "Ring 2 (2 of 3)"), 6, 28),
    "decoding": running(Phase(PhaseKind.DECODING)),
    "ready": GROUP,
    "asleep": replace(GROUP, state="asleep"),
    # The dead ranks' heartbeat page is still readable.
    "failed": replace(GROUP, state="failed", reason="process 1 failed: killed"),
    "broken": replace(GROUP, state="broken", reason="process 1 failed: killed", ranks=()),
}


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    monkeypatch.setattr(time, "monotonic", lambda: NOW)


@pytest.mark.parametrize("words", STATES)
def test_each_state_has_its_words_and_goes_over_the_wire(words):
    gauge = Gauge("NVIDIA L40", 48, 40, 0.5, 60, 250.0, 300.0)
    (group,) = show_groups([STATES[words]], {"cuda:1": gauge})["groups"]
    assert json.loads(json.dumps(group)) == group
    assert group["words"] == words
    assert group["models"] == list(MODELS)
    assert group["reason"] == ("process 1 failed: killed" if words in ("failed", "broken") else "")
    assert [rank["device"] for rank in group["ranks"]] == ["cuda:0", "cuda:1"]
    ended = words in ("not started", "failed", "broken")
    assert [(rank["pid"], rank["weight_bytes"]) for rank in group["ranks"]] == (
        [(None, 0), (None, 0)] if ended else [(11, 10), (12, 11)]
    )
    assert [rank["gauge"] for rank in group["ranks"]] == [None, {**vars(gauge)}]


def test_ranks_show_their_own_progress_and_only_while_they_work():
    assert show_progress([STATES["loading 38 % · about 7 s left"]]) == [
        {"device": "cuda:0", "words": "loading 50 %", "progress": 0.5, "left": "about 4 s left"},
        {"device": "cuda:1", "words": "loading 25 %", "progress": 0.25, "left": "about 15 s left"},
    ]
    (group,) = show_groups([STATES["reading 24 GB · about 15 s left"]], {})["groups"]
    assert [(bar["words"], bar["left"]) for bar in group["ranks"]] == [
        ("reading 24 GB", "about 15 s left")
    ] * 2
    _, second = show_progress([STATES["step 12 of 28 · about 6 s left"]])
    assert (second["words"], second["progress"], second["left"]) == ("step 11 of 28", 0.393, "about 6 s left")
    assert show_progress([STATES["trying Ring 2 (2 of 3) 6/28"]])[1]["words"] == "step 11 of 28"
    bars = show_progress([STATES["importing libraries"]])
    assert [(bar["words"], bar["progress"]) for bar in bars] == [("importing libraries", 0.0)] * 2
    assert [bar["words"] for bar in show_progress([STATES["starting, about 10 s, once"]])] == [
        "starting, about 10 s, once"
    ] * 2
    assert show_progress([STATES["ready"], STATES["failed"]]) == []


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0.2, "about 1 s left"),
        (9.6, "about 10 s left"),
        (21.0, "about 25 s left"),
        (61.0, "about 2 min left"),
        (7201.0, "about 3 h left"),
    ],
)
def test_time_left_is_said_in_round_numbers(seconds, words):
    assert in_words(seconds) == words


def test_only_buttons_that_do_something_can_be_pressed():
    useful = {
        words: {name for name, why in why_not(group).items() if not why} for words, group in STATES.items()
    }
    busy = {words for words, group in STATES.items() if group.state in ("starting", "running")}
    assert useful == {
        **{words: set() for words in busy},
        "not started": {"restart"},
        "ready": {"sleep", "restart", "stop"},
        "asleep": {"wake", "restart", "stop"},
        "failed": {"restart"},
        "broken": {"reset"},
    }
    assert {why_not(STATES["broken"])[name] for name in ("sleep", "wake", "restart", "stop")} == {
        "they failed too often; press Allow restarts first"
    }
    assert why_not(GROUP, left_out=("cuda:1",))["reset"] == ""
    assert "cancel" in why_not(STATES["decoding"])["stop"]
