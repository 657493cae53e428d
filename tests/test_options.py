"""The choices of how ranks compute a model: their defaults, and that a misspelt choice is refused by name."""

from __future__ import annotations

import pytest

from parallel_backend.errors import RequestError
from parallel_backend.options import ComputeOptions


def test_by_default_nothing_is_compiled_and_the_kernel_is_chosen():
    assert ComputeOptions() == ComputeOptions("off", "auto") and not ComputeOptions().compiles
    assert ComputeOptions("blocks").compiles


@pytest.mark.parametrize(
    ("name", "choice"), [("compile", {"compile": "all"}), ("attention", {"attention": "saige"})]
)
def test_a_misspelt_choice_is_refused_with_the_right_ones(name, choice):
    with pytest.raises(
        RequestError, match=rf"{name} .* is unknown; choose one of (auto, off, blocks|auto, .*sage)"
    ):
        ComputeOptions(**choice)
