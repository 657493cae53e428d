"""Shares of devices, from numbers and from memory, and the texts that are refused."""

import pytest

from parallel_backend.errors import StrategyError
from parallel_backend.machine import device_shares
from parallel_backend.machine.device_shares import read_shares, unequal_remark
from parallel_backend.machine.topology import Device, Topology

TWO = ("cuda:0", "cuda:1")
CARDS = Topology(
    tuple(
        Device(i, f"GPU-{i}", name, gib * 2**30) for i, (name, gib) in enumerate((("4090", 24), ("4080", 16)))
    )
)


@pytest.fixture(autouse=True)
def cards(monkeypatch):
    """Returns a function that changes the GPUs of this computer; they are CARDS."""

    def are(topology):
        monkeypatch.setattr(device_shares, "visible_topology", lambda: topology)

    are(CARDS)
    return are


@pytest.mark.parametrize(
    ("text", "shares"),
    [
        ("", ()),
        ("  ", ()),
        ("24,16", (24, 16)),
        ("3:2", (3, 2)),
        (" 1.5 ; 1 ", (1.5, 1)),
        ("Memory", (24, 16)),
    ],
)
def test_what_a_person_may_write(text, shares):
    assert read_shares(text, TWO) == shares


def test_memory_follows_the_devices_in_their_order():
    assert read_shares("memory", ("cuda:1", "cuda:0")) == (16, 24)
    assert read_shares("memory", ("cpu:0", "cpu:1")) == ()


@pytest.mark.parametrize(
    ("text", "devices", "told"),
    [
        ("24,16,8", TWO, "2 in all and not 3"),
        ("24", TWO, "2 in all and not 1"),
        ("big,small", TWO, "not understood"),
        ("memory", ("cuda:0", "cuda:7"), "cuda:7"),
    ],
)
def test_what_does_not_fit_is_named(text, devices, told):
    with pytest.raises(StrategyError, match=told):
        read_shares(text, devices)


def test_devices_that_differ_and_share_evenly_are_remarked_on(cards):
    assert "24, 16 GiB" in unequal_remark(TWO)
    assert unequal_remark(("cuda:0",)) is None
    assert unequal_remark(("cpu:0", "cpu:1")) is None
    cards(Topology(tuple(Device(i, f"GPU-{i}", "4090", 24 * 2**30) for i in range(2))))
    assert unequal_remark(TWO) is None
