"""The tiny models cover the table's classes, and their calls every argument with which tokens may stay sharded."""

import pytest

from parallel_backend.models.comfyui.tiny.cases import CASES
from parallel_backend.models.tokens.table import TABLE, token_mode
from parallel_backend.requests import BANDS, BLOCK, STAY

pytestmark = pytest.mark.usefixtures("comfyui_here")


def test_every_class_has_a_case():
    assert set(CASES) == set(TABLE)


@pytest.mark.parametrize("name", CASES)
def test_cases_are_of_their_class_and_cover_its_calls(name):
    given, modes = set(), set()
    for build, inputs in CASES[name].values():
        module = build()
        assert type(module).__name__ == name
        assert type(module).__module__ == TABLE[name].source.removesuffix(".py").replace("/", ".")
        kwargs = inputs(1, 8, 8)[1]
        given |= {key for key, value in kwargs.items() if value is not None}
        modes.add(token_mode(name, kwargs))
    assert given >= TABLE[name].stays_with, "an argument with which tokens stay apart is proven by no call"
    if TABLE[name].bands:
        assert modes == {BANDS}
    else:
        assert modes - {BLOCK} == ({STAY} if TABLE[name].stays_with else set())
