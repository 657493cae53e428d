"""The settings that apply: valid values, defaults for invalid ones with one line in the log, and changes at once."""

import itertools
import json
import logging
import math
import os
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from comfy_harness import ROOT
from pack_nodes import import_node_module
from pages import locale
from parallel_backend.errors import StrategyError
from parallel_backend.options import ComputeOptions
from parallel_backend.planner.rules import StrategySettings
from parallel_backend.strategy import ParallelStrategy

user_settings = import_node_module("nodes.host.settings")
PREFIX = user_settings.PREFIX
DEFAULTS = user_settings.DEFAULTS
check_settings = user_settings.check_settings
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
)


def test_sound_values_count():
    wished = {
        "default_devices": "cpu:2",
        "sleep_after_minutes": 5,
        "stop_after_minutes": 0.5,
        "start_at_launch": True,
        "allow_approximate": False,
        "try_strategies": False,
        "make_encoders_parallel": True,
        "preload_next": False,
        "metrics": True,
        "price_per_gpu_hour": 2.5,
    }
    assert check_settings({PREFIX + name: value for name, value in wished.items()}) == (wished, [])
    assert check_settings({"Comfy.Something": 3}) == (DEFAULTS, [])


@settings(max_examples=200)
@given(st.dictionaries(st.sampled_from(sorted(DEFAULTS)), ANYTHING))
def test_whatever_stands_there_each_setting_has_its_type_and_range(found):
    values, problems = check_settings({PREFIX + name: value for name, value in found.items()})
    assert {name: type(value) for name, value in values.items()} == {
        name: type(value) for name, value in DEFAULTS.items()
    }
    assert all(0 <= values[name] <= 10080 for name in ("sleep_after_minutes", "stop_after_minutes"))
    assert all(len(problem) < 400 for problem in problems)


MINUTES, PRICE = "it must be a number of minutes from 0", "a number from 0 (none) to 1,000,000"


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        *(("sleep_after_minutes", value, MINUTES) for value in (10**400, -(10**400), math.inf, math.nan)),
        *(("price_per_gpu_hour", value, PRICE) for value in (-0.01, 1e7, math.nan, "2.50", True, None)),
        *(("default_devices", text, "") for text in ("1" * 5000, "cpu:" + "9" * 5000, "0," * 5000)),
    ],
)
def test_a_value_that_a_setting_cannot_have_leaves_the_default(name, value, words):
    values, (problem,) = check_settings({PREFIX + name: value})
    assert values == DEFAULTS and words in problem and len(problem) < 300


def test_a_change_counts_at_once_and_each_problem_is_logged_once(tmp_path, caplog):
    path = tmp_path / "comfy.settings.json"

    def read(path):
        return user_settings.read_settings(path)[0]

    assert read(path) == DEFAULTS
    times = itertools.count(1)

    def write(text):
        path.write_text(text)
        os.utime(path, ns=(next(times),) * 2)  # a new time, as ComfyUI's own writes have

    with caplog.at_level(logging.WARNING):
        write(json.dumps({f"{PREFIX}metrics": True, f"{PREFIX}default_devices": "cuda:99"}))
        for _ in range(3):
            assert read(path) == {**DEFAULTS, "metrics": True}
        assert len(caplog.records) == 1
        assert "default_devices is 'cuda:99': " in caplog.records[0].message
        assert caplog.records[0].message.endswith("; all counts")
        for damaged in ('{"a": ', "[]", "[" * 100_000):
            write(damaged)
            assert read(path) == DEFAULTS
        assert len(caplog.records) == 4
    write(json.dumps({f"{PREFIX}sleep_after_minutes": 3}))
    assert read(path) == {**DEFAULTS, "sleep_after_minutes": 3.0}
    path.unlink()
    assert read(path) == DEFAULTS


def test_what_is_approximate_is_not_chosen_and_refused_by_hand_unless_it_is_exact_after_all(monkeypatch):
    monkeypatch.setattr(user_settings, "setting", {"allow_approximate": False}.__getitem__)
    permitted = user_settings.permitted
    auto = StrategySettings(approximation="allowed")
    assert permitted(auto, 20).approximation == "never"

    def by_hand(**degrees):
        return StrategySettings(mode="manual", strategy=ParallelStrategy(**degrees))

    for exact in (by_hand(ulysses_degree=2), by_hand(pipefusion_degree=2, warmup_steps=20)):
        assert permitted(exact, 20).strategy == exact.strategy
    with pytest.raises(StrategyError, match="pipefusion_degree to 1, or warmup_steps to 20"):
        permitted(by_hand(pipefusion_degree=2, warmup_steps=19), 20)
    with pytest.raises(StrategyError, match="step_cache to off"):
        permitted(auto, 20, step_cache=True)
    with pytest.raises(StrategyError, match="set attention to auto"):
        permitted(auto, 20, computing=ComputeOptions(attention="sage"))
    with pytest.raises(StrategyError, match="set exchange_dtype to same"):
        permitted(auto, 20, computing=ComputeOptions(exchange_dtype="fp8"))
    exact = ComputeOptions("blocks", attention="flash")
    assert permitted(auto, 20, computing=exact).approximation == "never"


def test_the_page_offers_the_same_settings_in_each_language():
    script = (ROOT / "web" / "settings.js").read_text()
    assert set(re.findall(r"setting\(\s*\"(\w+)\"", script)) == set(DEFAULTS)
    for language in (ROOT / "locales").iterdir():
        texts = locale(language.name, "settings")
        assert set(texts) == {(PREFIX + name).replace(".", "_") for name in DEFAULTS}
        for text in texts.values():
            assert text["name"] and text["tooltip"]
            if language.name == "en":  # without a locale the script's texts are shown
                assert all(f'"{words}"' in script for words in text.values())
