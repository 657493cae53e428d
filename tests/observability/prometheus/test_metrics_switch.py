"""The metrics switch: off by default, controlled by the setting or the variable, and harmless without the library."""

import sys

import pytest

from parallel_backend.errors import PlatformError
from parallel_backend.observability.prometheus.metrics import CONTENT_TYPE
from parallel_backend.observability.prometheus.metrics_switch import VARIABLE, MetricsSwitch
from parallel_backend.sidecar.group import events
from parallel_backend.sidecar.group.events import RequestEnded


def _listeners() -> int:
    return len(events._listeners)


def test_off_nothing_listens_and_on_counts_from_then_on():
    wish = {"on": False}
    switch, before = MetricsSwitch(lambda: wish["on"], lambda: 0.0), _listeners()
    answer = switch.scrape()
    assert (answer.status, _listeners()) == (404, before)
    assert b"Settings" in answer.body and VARIABLE.encode() in answer.body
    wish["on"] = True
    try:
        answers = [switch.scrape(), switch.scrape()]
        assert [(a.status, a.content_type) for a in answers] == [(200, CONTENT_TYPE)] * 2
        assert _listeners() == before + 1
        events.emit(RequestEnded(("x",), "decode", "done", 0.5, None, None, None, 2))
        series = b'parallel_sampling_images_total{model="vae",request="decode",strategy="rows 1"} 2.0'
        assert series in switch.scrape().body.splitlines()
    finally:
        wish["on"] = False
        assert (switch.scrape().status, _listeners()) == (404, before)


@pytest.mark.parametrize(
    ("word", "setting", "on"), [("on", False, True), ("OFF", True, False), ("maybe", True, True)]
)
def test_the_variable_outranks_the_setting_unless_it_makes_no_sense(word, setting, on, caplog, monkeypatch):
    monkeypatch.setenv(VARIABLE, word)
    switch, before = MetricsSwitch(lambda: setting, lambda: 0.0), _listeners()
    try:
        switch.begin()
        answer = switch.scrape()
        assert _listeners() == before + on and answer.status == (200 if on else 404)
        assert on or b"OFF" in answer.body
        assert ("maybe" in caplog.text) == (word == "maybe") and len(caplog.records) <= 1
    finally:
        monkeypatch.setenv(VARIABLE, "off")
        switch.scrape()


def test_without_the_library_all_else_works_and_a_scrape_says_what_to_install(monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "prometheus_client", None)  # importing it raises ImportError
    monkeypatch.delitem(sys.modules, "parallel_backend.observability.prometheus.metrics")
    switch, before = MetricsSwitch(lambda: True, lambda: 0.0), _listeners()
    switch.begin()
    assert "pip install prometheus_client" in caplog.text
    with pytest.raises(PlatformError):
        switch.follow()
    answer = switch.scrape()
    assert (answer.status, _listeners()) == (503, before) and b"pip install prometheus_client" in answer.body
