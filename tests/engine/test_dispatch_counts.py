"""Counts of what blocks ask of a GPU: no more than with diffusers' context parallelism, and the host never waits."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from counted_flux import call_counted, diffusers_call, flux_calls
from dispatch_counter import DEVICE, Counts, counted, world_of_one_process
from parallel_backend.engine.attention.sequence import SequenceAttention
from parallel_backend.engine.comm.groups import Layouts
from parallel_backend.engine.tokens.block_tokens import BlockTokens
from parallel_backend.models.attention import AttentionCall
from parallel_backend.strategy import ParallelStrategy

ULYSSES_2 = ParallelStrategy(ulysses_degree=2)
TOKENS, HEADS, CHANNELS = 6, 4, 8


@pytest.fixture(scope="module")
def diffusers_blocks() -> Counts:
    """Returns the counts of one double and two single blocks in diffusers."""
    return diffusers_call((2, 4)) - diffusers_call((1, 2))


def test_blocks_of_flux_cost_no_more_than_diffusers_own(diffusers_blocks):
    found = []
    for blocks in ((1, 2), (2, 4)):
        with flux_calls(ULYSSES_2, *blocks) as forward:
            found.append(call_counted(forward))
    few, many = found
    ours = many - few
    assert many.host_syncs == 0
    assert ours.operators <= 1.05 * diffusers_blocks.operators
    assert ours.copied_bytes <= diffusers_blocks.copied_bytes
    assert ours.collectives == 3 * 2 < diffusers_blocks.collectives == 3 * 4
    assert ours.sent_bytes == diffusers_blocks.sent_bytes


def test_no_call_with_sliced_layers_of_a_size_that_was_met_waits_for_the_device():
    with flux_calls(ParallelStrategy(tensor_degree=2), 2, 2) as forward:
        call_counted(forward)
        assert call_counted(forward).host_syncs == 0


@pytest.mark.parametrize(("heads", "operators"), [(4, 5), (3, 9)])
def test_attention_of_comfyuis_modules_copies_each_tensor_once(heads, operators):
    """Heads that do not divide evenly need a copy for each rank, but the copied bytes stay the same."""

    def plain(call):
        return F.scaled_dot_product_attention(call.q, call.k, call.v)

    with world_of_one_process(0, 2) as world:
        layouts = Layouts(world)
        layout = layouts.get(ULYSSES_2)
        tokens = BlockTokens(layout.sequence, (), counts={"img": 2 * TOKENS})
        tensors = [torch.empty(1, heads, TOKENS, CHANNELS, device=DEVICE) for _ in range(3)]
        with torch.inference_mode(), counted() as counter:
            attention = SequenceAttention(layout, tokens, ("img",))
            out = attention(plain, AttentionCall(*tensors, heads, skip_reshape=True))
    assert out.shape == (1, TOKENS, heads * CHANNELS)
    copied, counts = 4 * TOKENS * heads * CHANNELS * 4, counter.counts
    assert (counts.operators, counts.copied_bytes, counts.collectives) == (operators, copied, 2)
