"""The quick check that values and modules are unchanged."""

import torch
from torch import nn

from parallel_backend.job.same import SameModules, SameValues


def test_other_values_in_a_dict_are_seen():
    backup: dict[str, object] = {}
    same = SameValues([backup])
    assert same.still_hold()
    backup["weight"] = torch.ones(2)
    assert not same.still_hold()
    backup.clear()
    assert same.still_hold()


def test_a_value_that_equals_the_one_before_is_another():
    values = {"weight": torch.ones(2)}
    same = SameValues([values])
    values["weight"] = torch.ones(2)
    assert not same.still_hold()


def test_modules_are_the_same_until_one_of_them_is_changed():
    base = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.GELU()))
    same = SameModules(base)
    assert same.still_hold()
    base[1][0].approximate = "tanh"
    assert not same.still_hold()
    base[1][0].approximate = "none"
    assert same.still_hold()
    base[1].__class__ = nn.Module
    assert not same.still_hold()
