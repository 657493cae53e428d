"""The words and buttons of the status panel in each state of a group."""

import json
import time
from dataclasses import replace

import pytest

from parallel_backend.observability.gauges import Gauge
from parallel_backend.observability.panel import show_groups, show_progress, why_not
from parallel_backend.observability.time_left import in_words
from parallel_backend.sidecar.group.phases import Phase, PhaseKind
from parallel_backend.sidecar.status import GroupStatus, RankStatus

RANKS = (
    RankStatus(False, "", 12, 0, frozenset(), 0.0, 0.5, 10, 20, 30, 0, "cuda:0", 11),
    RankStatus(False, "", 11, 0, frozenset(), 0.0, 0.25, 11, 21, 31, 1, "cuda:1", 12),
)
GROUP = GroupStatus(("cuda:0", "cuda:1"), "ready", "", None, ("flux.safetensors",), 0, 0, (0.25, 0.5), RANKS)


NOW = 1000.0  # s, of time.monotonic()


def loading(seconds: float, size: int = 0) -> Phase:
    """Returns the phase of a load that began `seconds` ago; `size`: bytes to read, 0 if unknown."""
    return Phase(PhaseKind.LOADING, "flux.safetensors", size, NOW - seconds)


STATES = {
    "not started": replace(GROUP, state="down", ranks=()),
    "starting, about 10 s, once": replace(
        GROUP, state="starting", phase=Phase(PhaseKind.STARTING, "2 processes")
    ),
    "loading 38 % · about 7 s left": replace(GROUP, state="running", phase=loading(4.2)),
    "first step": replace(GROUP, state="running", phase=Phase(PhaseKind.FIRST_STEP), steps=28),
    "step 12 of 28 · about 6 s left": replace(
        GROUP, state="running", phase=Phase(PhaseKind.SAMPLING), step=12, steps=28
    ),
    "trying Ring 2 (2 of 3) 6/28": replace(
        GROUP, state="running", phase=Phase(PhaseKind.TRYING, "Ring 2 (2 of 3)"), step=6, steps=28
    ),
    "importing libraries": replace(
        GROUP,
        state="running",
        phase=Phase(PhaseKind.LOADING, "flux.safetensors"),
        ranks=tuple(replace(rank, loaded=0.0) for rank in RANKS),
    ),
    "decoding": replace(GROUP, state="running", phase=Phase(PhaseKind.DECODING)),
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


def test_a_load_says_what_it_reads_and_how_long_it_still_takes():
    reading = replace(
        GROUP,
        state="running",
        phase=loading(14.5, 24_000_000_000),
        ranks=tuple(replace(rank, loaded=0.5) for rank in RANKS),
    )
    (group,) = show_groups([reading], {})["groups"]
    assert group["words"] == "reading 24 GB · about 15 s left"
    assert [(rank["words"], rank["left"]) for rank in group["ranks"]] == [
        ("reading 24 GB", "about 15 s left")
    ] * 2


def test_nobody_guesses_the_time_before_a_step_is_done():
    first = replace(GROUP, state="running", phase=Phase(PhaseKind.SAMPLING), step=0, steps=28)
    assert show_groups([first], {})["groups"][0]["words"] == "step 0 of 28"


def test_only_buttons_that_do_something_can_be_pressed():
    useful = {
        words: {name for name, why in why_not(group).items() if not why} for words, group in STATES.items()
    }
    busy = {words for words, group in STATES.items() if group.state in ("starting", "running")}
    assert {
        "starting, about 10 s, once",
        "loading 38 % · about 7 s left",
        "first step",
        "step 12 of 28 · about 6 s left",
        "decoding",
    } < busy
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


def test_all_models_that_are_held_are_named_the_one_in_use_first():
    group = replace(GROUP, models=("low.safetensors", "high.safetensors"))
    (shown,) = show_groups([group], {})["groups"]
    assert shown["model"] == "low.safetensors"
    assert shown["models"] == ["low.safetensors", "high.safetensors"]
