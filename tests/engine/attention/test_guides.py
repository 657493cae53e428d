"""The masks of LTX's guides for ranges of queries: joined, they equal the masks for all queries."""

from types import SimpleNamespace

import pytest
import torch

from parallel_backend.engine.attention.guides import Guides

VIDEO, GUIDES, AFTER = 5, 4, 2
TOTAL = VIDEO + GUIDES + AFTER


def as_comfyui_has_them():
    values = torch.arange(1.0, 1 + TOTAL * (GUIDES + 1)).view(1, 1, GUIDES + 1, TOTAL)
    return SimpleNamespace(
        guide_start=VIDEO, tracked_count=GUIDES, noisy_mask=values[:, :, :1], tracked_mask=values[:, :, 1:]
    )


def rows(guides, first, count):
    """Returns what the guides add to the scores of `count` queries from number `first` on, [count, TOTAL]."""
    found = torch.full((count, TOTAL), torch.nan)
    for own, mask in guides.of_queries(first, count):
        assert found[own].isnan().all(), "each query is in one part"
        found[own] = 0 if mask is None else mask[0, 0]
    return found


@pytest.mark.parametrize("sizes", [(11,), (4, 7), (5, 4, 2), (1, 0, 7, 3)], ids=str)
def test_what_falls_to_shares_of_the_queries_is_what_falls_to_all(sizes):
    value = as_comfyui_has_them()
    guides = Guides.of(value)
    whole = torch.zeros(TOTAL, TOTAL)
    whole[:VIDEO] = value.noisy_mask[0, 0]
    whole[VIDEO : VIDEO + GUIDES] = value.tracked_mask[0, 0]
    found, first = [], 0
    for size in sizes:
        found.append(rows(guides, first, size))
        first += size
    assert torch.equal(torch.cat(found), whole)
