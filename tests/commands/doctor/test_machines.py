"""The doctor's verdicts about the machines of a cluster; its report does not name the machines."""

from parallel_backend.commands.doctor.devices import check_machines, numbered, pair_of
from parallel_backend.commands.doctor.report import find_private, scrub

FOUR = tuple(f"cuda:{index}@lab/{machine}" for machine in ("big.box", "b") for index in (0, 1))
EQUAL = dict.fromkeys(FOUR, 24 * 10**9)


def named(verdicts):
    return {verdict.name: verdict for verdict in verdicts}


def test_machines_that_are_alike_are_listed_by_number():
    found = named(check_machines(FOUR, EQUAL))
    assert list(found) == ["machine 1", "machine 2", "installation"]
    assert found["machine 1"].status == "ok" and found["machine 1"].finding == "2 GPUs: 24 GB, 24 GB"
    assert "run the doctor on each machine" in found["installation"].remedy


def test_machines_that_differ_are_slow_together():
    for devices, memory in ((FOUR[1:], EQUAL), (FOUR, {**EQUAL, FOUR[3]: 16 * 10**9})):
        assert named(check_machines(devices, memory))["together"].status == "slow"


def test_two_devices_are_of_two_machines_where_there_are_two():
    assert pair_of(FOUR) == (FOUR[0], FOUR[2])
    assert pair_of(FOUR[:2]) == FOUR[:2]
    assert pair_of(("cpu:0", "cpu:1", "cpu:2")) == ("cpu:0", "cpu:1")


def test_names_of_machines_are_taken_out_and_words_like_them_stay():
    private = find_private(numbered(FOUR))
    text = "cuda:1@lab/big.box left; Machine big.box has a b; lab/b; lab/bb; Machine b is gone"
    assert scrub(text, private) == (
        "cuda:1@<machine 1> left; <machine 1> has a b; <machine 2>; lab/bb; <machine 2> is gone"
    )
