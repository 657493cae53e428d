"""The soak test's verdict: usage that levels off is no leak, usage that grows with the prompts is one."""

import pytest
from adversaries.soak import MIB, Usage, growth


def usages(memory=lambda n: 400.0, descriptors=lambda n: 30, threads=lambda n: 9, rounds=9):
    return [Usage(int(memory(n) * MIB), descriptors(n), threads(n)) for n in range(rounds)]


@pytest.mark.parametrize(
    "seen",
    [
        usages(),
        usages(memory=lambda n: 200.0 + 200.0 * min(n, 2)),  # warms up
        usages(memory=lambda n: 400.0 + 30.0 * (n % 3), descriptors=lambda n: 30 + n % 2),  # wanders
        usages(rounds=6),
    ],
)
def test_what_levels_off_is_no_leak(seen):
    assert list(growth(seen)) == []


@pytest.mark.parametrize(
    ("seen", "words"),
    [
        (usages(memory=lambda n: 400.0 + 4.0 * n), "memory 416.0 -> 428.0 MiB in 3 rounds"),
        (usages(descriptors=lambda n: 30 + n // 3), "descriptors 31 -> 32 in 3 rounds"),
        (usages(threads=lambda n: 9 + n), "threads 13 -> 16 in 3 rounds"),
    ],
)
def test_what_grows_with_the_rounds_is_told(seen, words):
    assert list(growth(seen)) == [words]
