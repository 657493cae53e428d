"""Has torch load what its first compilation needs before ranks are forked: each of them would take a second."""

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def warm_compiler():
    torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))
