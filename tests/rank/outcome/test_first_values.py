"""Code of a job that reads a tensor on ranks with unlike cards gets the first rank's values."""

import math

import numpy
import pytest
import torch
from torch import Tensor

from parallel_backend.rank.outcome.agreement import RanksApart
from parallel_backend.rank.outcome.first_values import are_unlike, first_ranks_values
from ranks import run_ranks


def _written_through(value: Tensor) -> float:
    array = value.numpy(force=True)
    array += 1
    return value.tolist()


READS = {
    "item": lambda value: value.item(),
    "float": float,
    "a condition": lambda value: value > 1.0,
    "bool": lambda value: bool(value > 1.0),
    "an int": lambda value: int((value * 2**60).long()),
    "a list": lambda value: torch.stack([value, -value]).tolist(),
    "a list of one number": lambda value: value.tolist(),
    "an array": lambda value: value.numpy().tolist(),
    "an array that numpy makes": lambda value: numpy.asarray(value).tolist(),
    "an array's own memory": lambda value: _written_through(value),
    "bfloat16": lambda value: (value * 3).bfloat16().tolist(),
}


def test_a_value_that_differs_by_its_last_bit_is_the_first_ranks():
    def work(world) -> dict:
        pairs = {}
        for name, read in READS.items():
            value = torch.tensor(1.0 if world.rank == 0 else math.nextafter(1.0, 2.0), dtype=torch.float64)
            with first_ranks_values(world, lambda: True):
                found = read(value)
                if isinstance(found, Tensor):
                    found = 1 if found else 0
            pairs[name] = found, read(torch.tensor(1.0, dtype=torch.float64))
        return pairs

    for pairs in run_ranks(work, 2):
        for name, (found, expected) in pairs.items():
            assert found == (int(expected) if isinstance(expected, Tensor) else expected), name


def test_values_of_a_call_that_ranks_share_out_are_each_ranks():
    def work(world) -> list:
        with first_ranks_values(world, lambda: False):
            return [torch.tensor(float(world.rank)).item()]

    assert run_ranks(work, 2) == [[0.0], [1.0]]


def test_ranks_at_different_lines_end_with_an_error_on_both():
    def work(world) -> str:
        value = torch.tensor(1.0)
        try:
            with first_ranks_values(world, lambda: True):
                if world.rank == 0:
                    value.item()
                else:
                    float(value)
        except RanksApart as apart:
            return str(apart)
        return "went on"

    assert all("went different ways" in words for words in run_ranks(work, 2))


def test_afterwards_tensors_read_as_before():
    before = {name: getattr(Tensor, name) for name in ("item", "tolist", "__bool__", "__float__")}

    def work(world) -> str:
        with pytest.raises(ZeroDivisionError), first_ranks_values(world, lambda: True):
            raise ZeroDivisionError
        return str({name: getattr(Tensor, name) for name in before} == before)

    assert run_ranks(work, 2) == ["True"] * 2


def test_ranks_on_one_kind_of_device_are_not_unlike():
    assert run_ranks(lambda world: [are_unlike(world)], 2) == [[False], [False]]
