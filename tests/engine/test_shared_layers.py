"""Which layers of a text encoder are shared out, and to which ranks."""

from __future__ import annotations

import pytest
from torch import nn

from parallel_backend.engine.shared_layers import assign_owners, find_layers


def test_layers_are_those_of_the_outermost_lists_of_one_class():
    def tower():
        return nn.ModuleDict(
            {"layers": nn.ModuleList(nn.ModuleList([nn.Linear(2, 2)] * 2) for _ in range(3))}
        )

    model = nn.ModuleDict(
        {
            "text": tower(),
            "vision": tower(),
            "alone": nn.ModuleList([nn.Linear(2, 2)]),
            "mixed": nn.ModuleList([nn.Linear(2, 2), nn.LayerNorm(2)]),
        }
    )
    assert list(find_layers(model)) == [*model["text"]["layers"], *model["vision"]["layers"]]


@pytest.mark.parametrize(
    ("widths", "ranks", "owners"),
    [
        ([4] * 4, 2, [0, 0, 1, 1]),
        ([4] * 5, 2, [0, 0, 1, 1, 1]),
        ([4] * 6, 3, [0, 0, 1, 1, 2, 2]),
        ([16, 4, 4, 4], 2, [0, 1, 1, 1]),
        ([4], 3, [1]),
        ([], 2, []),
    ],
)
def test_each_rank_has_about_as_many_bytes_in_order(widths, ranks, owners):
    assert assign_owners([nn.Linear(width, width) for width in widths], ranks) == owners
