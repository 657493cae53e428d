"""The choice between all devices and one for a VAE, by measured times; one device is tried if that is cheap."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from parallel_backend.machine.fingerprint import Fingerprint
from parallel_backend.planner import vae_choice
from parallel_backend.planner.store import MeasurementStore
from parallel_backend.planner.vae_choice import LONGEST_TRY, VaeChoice

HERE = Fingerprint(("a card", "a card"), ("torch 2",))


@pytest.fixture
def choice(tmp_path, monkeypatch):
    """Returns a function that makes a VaeChoice, by default for two devices, as in a process without decodes so far."""
    monkeypatch.setattr(vae_choice, "_WARM", set())
    monkeypatch.setattr(vae_choice, "GIVEN_UP", set())
    store = MeasurementStore(HERE, tmp_path)

    def make(network="a VAE", size=(4, 8, 6), devices=("GPU-a", "GPU-b"), *, tries=True):
        history = SimpleNamespace(devices=devices, ids=devices, store=store)
        return VaeChoice(history, network, size, tries=tries)

    return make


def timed(choice, *, shared, alone=None):
    """Returns `choice` after two calls each of `shared` and `alone` seconds: the first call is not stored."""
    for seconds, is_alone in ((shared, False), (alone, True)):
        for _ in range(2 if seconds is not None else 0):
            choice.record(seconds, is_alone=is_alone)
    return choice


def test_one_device_is_tried_twice_once_sharing_out_was_timed(choice):
    found = choice()
    ways = []
    for seconds in (9.0, 0.3, 7.0, 0.5, 0.3):
        ways.append(found.is_alone())
        found.record(seconds, is_alone=ways[-1])
    assert ways == [False, False, True, True, False]
    assert (found.shared_seconds, found.alone_seconds) == (0.3, 0.5)


def test_it_stays_with_one_device_where_that_is_faster(choice):
    assert timed(choice(), shared=0.5, alone=0.3).is_alone()
    assert not timed(choice("another VAE"), shared=0.3, alone=0.5).is_alone()


def test_what_was_timed_counts_for_later_processes(choice, monkeypatch):
    timed(choice(), shared=0.5, alone=0.3)
    monkeypatch.setattr(vae_choice, "_WARM", set())
    assert choice().is_alone() and choice(tries=False).is_alone()


@pytest.mark.parametrize(
    ("shared", "tries", "is_alone"),
    [(LONGEST_TRY / 2, True, True), (LONGEST_TRY / 2 + 0.1, True, False), (0.1, False, False)],
    ids=["as long as may be", "too long", "not wished"],
)
def test_only_what_is_cheap_and_wished_is_tried(choice, shared, tries, is_alone):
    assert timed(choice(tries=tries), shared=shared).is_alone() == is_alone


@pytest.mark.parametrize(
    "other",
    [
        {"network": "another VAE"},
        {"size": (4, 8, 7)},
        {"size": (4, 9, 6)},
        {"size": (4, 2, 8, 6)},
        {"devices": ("GPU-a", "GPU-c")},
    ],
    ids=str,
)
def test_times_are_of_one_network_size_and_set_of_devices(choice, other):
    timed(choice(), shared=0.5, alone=0.3)
    assert choice(**other).shared_seconds is None


def test_one_devices_time_counts_beside_any_others(choice):
    timed(choice(), shared=0.5, alone=0.3)
    assert choice(devices=("GPU-a", "GPU-c")).alone_seconds == 0.3


def test_a_device_without_the_memory_is_not_tried_again(choice):
    found = timed(choice(), shared=0.1)
    assert found.is_alone()
    found.give_up()
    assert not found.is_alone()


def test_without_a_history_all_devices_share_them_out(choice):
    found = VaeChoice(None, "a VAE", (4, 8, 6), tries=True)
    found.record(0.1, is_alone=False)
    found.give_up()
    assert not found.is_alone() and found.shared_seconds is None and found.alone_seconds is None
