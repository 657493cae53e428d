"""A compilation before ranks are forked: torch then loads what it needs once, instead of a second in each rank."""

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def warm_compiler():
    torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))
