"""The words and buttons of the status panel in each state of a group."""

import json
from dataclasses import replace

import pytest

from parallel_backend.observability.gauges import Gauge
from parallel_backend.observability.panel import show_groups, show_progress, why_not
from parallel_backend.sidecar.group.phases import Phase, PhaseKind
from parallel_backend.sidecar.status import GroupStatus, RankStatus

RANKS = (
    RankStatus(0, "cuda:0", 11, 12, 0.5, 10, 20, 30),
    RankStatus(1, "cuda:1", 12, 11, 0.25, 11, 21, 31),
)
GROUP = GroupStatus(("cuda:0", "cuda:1"), "ready", "", None, "flux.safetensors", 0, 0, (0.25, 0.5), RANKS)
STATES = {
    "not started": replace(GROUP, state="down", ranks=()),
    "starting": replace(GROUP, state="starting", phase=Phase(PhaseKind.STARTING, "2 ranks")),
    "loading 38 %": replace(GROUP, state="running", phase=Phase(PhaseKind.LOADING, "flux.safetensors")),
    "first step": replace(GROUP, state="running", phase=Phase(PhaseKind.FIRST_STEP), steps=28),
    "sampling 12/28": replace(GROUP, state="running", phase=Phase(PhaseKind.SAMPLING), step=12, steps=28),
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
    "failed": replace(GROUP, state="failed", reason="rank 1 failed: killed"),  # what died still has its page
    "broken": replace(GROUP, state="broken", reason="rank 1 failed: killed", ranks=()),
}


@pytest.mark.parametrize("words", STATES)
def test_each_state_has_its_words_and_goes_over_the_wire(words):
    gauge = Gauge("NVIDIA L40", 48, 40, 0.5, 60, 250.0, 300.0)
    (group,) = show_groups([STATES[words]], {"cuda:1": gauge})["groups"]
    assert json.loads(json.dumps(group)) == group
    assert group["words"] == words
    assert group["reason"] == ("rank 1 failed: killed" if words in ("failed", "broken") else "")
    assert [rank["device"] for rank in group["ranks"]] == ["cuda:0", "cuda:1"]
    ended = words in ("not started", "failed", "broken")
    assert [(rank["pid"], rank["weight_bytes"]) for rank in group["ranks"]] == (
        [(None, 0), (None, 0)] if ended else [(11, 10), (12, 11)]
    )
    assert [rank["gauge"] for rank in group["ranks"]] == [None, {**vars(gauge)}]


def test_ranks_show_their_own_progress_and_only_while_they_work():
    assert show_progress([STATES["loading 38 %"]]) == [
        {"device": "cuda:0", "words": "loading 50 %", "progress": 0.5},
        {"device": "cuda:1", "words": "loading 25 %", "progress": 0.25},
    ]
    assert show_progress([STATES["sampling 12/28"]])[1] == {
        "device": "cuda:1",
        "words": "step 11 of 28",
        "progress": 0.393,
    }
    assert show_progress([STATES["trying Ring 2 (2 of 3) 6/28"]])[1]["words"] == "step 11 of 28"
    bars = show_progress([STATES["importing libraries"]])
    assert [(bar["words"], bar["progress"]) for bar in bars] == [("importing libraries", 0.0)] * 2
    assert [bar["words"] for bar in show_progress([STATES["starting"]])] == ["starting", "starting"]
    assert show_progress([STATES["ready"], STATES["failed"]]) == []


def test_only_buttons_that_do_something_can_be_pressed():
    useful = {
        words: {name for name, why in why_not(group).items() if not why} for words, group in STATES.items()
    }
    busy = {words for words, group in STATES.items() if group.state in ("starting", "running")}
    assert {"starting", "loading 38 %", "first step", "sampling 12/28", "decoding"} < busy
    assert useful == {
        **{words: set() for words in busy},
        "not started": {"restart"},
        "ready": {"sleep", "restart", "stop"},
        "asleep": {"wake", "restart", "stop"},
        "failed": {"restart"},
        "broken": {"reset"},
    }
    assert {why_not(STATES["broken"])[name] for name in ("sleep", "wake", "restart", "stop")} == {
        "they failed too often; press Try again first"
    }
    assert why_not(GROUP, left_out=("cuda:1",))["reset"] == ""
    assert "cancel" in why_not(STATES["decoding"])["stop"]


def test_all_models_that_are_held_are_named_the_one_in_use_first():
    group = replace(GROUP, model="low.safetensors", models=("low.safetensors", "high.safetensors"))
    (shown,) = show_groups([group], {})["groups"]
    assert shown["model"] == "low.safetensors"
    assert shown["models"] == ["low.safetensors", "high.safetensors"]
