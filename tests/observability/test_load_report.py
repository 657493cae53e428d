"""The report to a load balancer: the more prompts wait, the fewer come; a draining or broken ComfyUI gets none."""

import pytest

from parallel_backend.observability.gauges import Gauge
from parallel_backend.observability.load_report import LoadReport
from parallel_backend.sidecar.status import GroupStatus


def _report(waiting=0, states=("ready",), draining=False):
    groups = tuple(
        GroupStatus((f"cuda:{i}",), state, "", None, (), 0, 0, (), ()) for i, state in enumerate(states)
    )
    return LoadReport(waiting, groups, {"cuda:0": Gauge("a card", 24, 7)}, draining)


@pytest.mark.parametrize(
    ("waiting", "line"), [(0, "up 100%"), (1, "up 50%"), (3, "up 25%"), (10**6, "up 1%")]
)
def test_the_more_waits_the_less_it_gets_and_never_nothing(waiting, line):
    assert _report(waiting).agent_line("prompts") == _report(waiting).agent_line("pages") == line


@pytest.mark.parametrize(
    ("report", "word"),
    [
        (_report(states=("ready", "broken")), "broken"),
        (_report(draining=True), "draining"),
        (_report(states=("broken",), draining=True), "draining"),
    ],
)
def test_one_that_takes_none_is_down_for_prompts_and_keeps_the_pages_it_has(report, word):
    assert report.agent_line("prompts") == f"down #{word}"
    assert report.agent_line("pages") == "up 0%"
    assert report.as_json()["refusal"] == word and report.as_json()["takes_prompts"] is False


def test_people_see_the_queue_the_groups_and_what_is_free():
    assert _report(2, ("ready", "asleep")).as_json() == {
        "takes_prompts": True,
        "refusal": "",
        "waiting": 2,
        "groups": [{"devices": ["cuda:0"], "state": "ready"}, {"devices": ["cuda:1"], "state": "asleep"}],
        "free_bytes": {"cuda:0": 7},
    }
