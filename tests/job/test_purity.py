"""A function's bytecode tells whether it may be pure, and functions of the same code and settings are equal."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import pytest
import torch

from parallel_backend.job.purity import is_pure, purity_of

STATE: list[int] = []


def adds(x):
    return x + 1


def appends(x):
    STATE.append(1)
    return x


def calls_one_that_appends(x):
    return appends(x)


def writes_in_place(x):
    x[0] = 1
    return x


def has_one_inside(x):
    return [appends(one) for one in x]


def collects(x):
    found = []
    for row in x:
        found.append(row * 2)
    return torch.stack(found)


def appends_to_an_alias(x):
    found = []
    if len(x):
        found = STATE
    found.append(1)
    return x


def appends_to_one_of_two(x):
    found = STATE if len(x) else []
    found.append(1)
    return x


def appends_to_an_argument(x, found=STATE):
    if not len(x):
        found = []
    found.append(1)
    return x


class Counts:
    calls = 0

    def __call__(self, x):
        self.calls += 1
        return x


class Plain:
    def __call__(self, x):
        return torch.relu(x)

    def adds_more(self, x):
        return adds(x) + self.appends

    def noisy(self, x):
        return self.noise(x)

    def noise(self, x):
        return x + torch.randn_like(x)


def closes_over(inner):
    return lambda x: inner(x)


def closes_over_an_object(plain):
    return lambda x: plain.noise(x)


MEANS_OF_ROWS = [lambda x: x.mean(1), lambda x: x.norm(dim=-1), lambda x: torch.mean(x, 1)]
OF_ALL_ROWS = [lambda x: x - x.mean(), lambda x: x / torch.norm(x), lambda x: eval("x + 1")]  # noqa: S307


@pytest.mark.parametrize(
    "function",
    [
        adds,
        collects,
        Plain(),
        Plain().__call__,
        Plain().adds_more,
        torch.relu,
        lambda x: x * 2,
        closes_over(adds),
        *MEANS_OF_ROWS,
    ],
)
def test_a_function_of_each_row_alone_is_pure(function):
    assert is_pure(function)


@pytest.mark.parametrize(
    "function",
    [
        appends,
        appends_to_an_alias,
        appends_to_an_argument,
        appends_to_one_of_two,
        calls_one_that_appends,
        has_one_inside,
        writes_in_place,
        Counts(),
        Counts().__call__,
    ],
)
def test_a_function_that_may_store_something_is_not(function):
    assert not is_pure(function)


@pytest.mark.parametrize(
    "function",
    [Plain().noise, Plain().noisy, closes_over_an_object(Plain()), closes_over(Plain().noisy), *OF_ALL_ROWS],
)
def test_a_function_that_draws_numbers_or_joins_rows_is_not(function):
    assert not is_pure(function)


def test_functions_of_the_same_code_are_told_apart_by_what_they_close_over():
    assert is_pure(closes_over(adds)) and not is_pure(closes_over(appends))


class Style:
    def __init__(self, shares):
        self.settings = SimpleNamespace(layers=[1, 2], shares=shares)

    def __call__(self, x):
        return x * 2


@pytest.mark.parametrize(
    "make", [Style, lambda shares: lambda x: x * shares, lambda shares: partial(adds, shares)]
)
def test_functions_of_the_same_code_and_settings_are_equal(make):
    one, same, other = (purity_of(make(shares)).code for shares in (True, True, False))
    assert one == same != other
