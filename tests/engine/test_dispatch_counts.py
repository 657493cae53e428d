"""What a block asks of a GPU, counted: no more than diffusers' own context parallelism, and nothing waited for."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from counted_flux import call_counted, diffusers_call, flux_forward
from dispatch_counter import DEVICE, Counts, counted, world_of_one_process
from parallel_backend.engine.attention.native import NativeAttention
from parallel_backend.engine.attention.sequence import UnevenAttention
from parallel_backend.engine.comm.collectives import PendingExchange
from parallel_backend.engine.comm.groups import Layouts
from parallel_backend.engine.token_split import TokenPlan
from parallel_backend.engine.tokens.block_tokens import BlockTokens
from parallel_backend.options import OVERLAP
from parallel_backend.strategy import ParallelStrategy

ULYSSES_2 = ParallelStrategy(ulysses_degree=2)
TOKENS, HEADS, CHANNELS = 6, 4, 8
SHARE = TOKENS * HEADS * CHANNELS * 4  # bytes of one of q, k, v of one rank in float32


@pytest.fixture(params=["off", "on"])
def overlap(request, monkeypatch):
    monkeypatch.setenv(OVERLAP, request.param)
    return request.param


@pytest.fixture(scope="module")
def diffusers_blocks() -> Counts:
    """One double and two single blocks."""
    return diffusers_call((2, 4)) - diffusers_call((1, 2))


def test_blocks_of_flux_cost_no_more_than_diffusers_own(overlap, diffusers_blocks):
    found = []
    for blocks in ((1, 2), (2, 4)):
        with flux_forward(ULYSSES_2, *blocks) as forward:
            found.append(call_counted(forward).counts)
    few, many = found
    ours = many - few
    assert many.host_syncs == 0
    assert ours.operators <= 1.05 * diffusers_blocks.operators
    assert ours.copied_bytes <= diffusers_blocks.copied_bytes
    assert ours.collectives == 3 * (2 if overlap == "off" else 3) < diffusers_blocks.collectives == 3 * 4
    assert ours.sent_bytes == diffusers_blocks.sent_bytes


@pytest.mark.parametrize(
    "strategy",
    [ParallelStrategy(tensor_degree=2), ParallelStrategy(pipefusion_degree=2, ring_degree=2)],
    ids=lambda strategy: strategy.describe(),
)
def test_no_call_of_a_size_that_was_met_waits_for_the_device(strategy):
    with flux_forward(strategy, 2, 2) as forward:
        call_counted(forward)
        assert call_counted(forward).counts.host_syncs == 0


def test_exchanges_run_beside_what_is_computed_next(monkeypatch):
    monkeypatch.setenv(OVERLAP, "on")
    taken = PendingExchange.taken

    def noted(exchange):
        counting[-1].events.append("taken")
        return taken(exchange)

    counting = []
    monkeypatch.setattr(PendingExchange, "taken", noted)
    with flux_forward(ULYSSES_2, 1, 1) as forward:
        events = call_counted(forward, began=counting.append).events
    double, single = _up_to_attention(events)
    exchange, attention = "c10d.alltoall_base_", "aten.scaled_dot_product_attention"
    # Values leave while keys and queries are made, of text and image.
    assert double == [exchange, *["aten.addmm"] * 4, exchange, "taken", "taken", attention]
    # All leave while the feed-forward layer computes.
    assert single == [
        exchange, *["aten.addmm"] * 2, exchange, "aten.addmm", "aten.gelu", "taken", "taken", attention
    ]  # fmt: skip


def _up_to_attention(events):
    """Of each attention what came since its first exchange was begun, without what is of no weight."""
    found, since = [], None
    for event in events:
        if event == "c10d.alltoall_base_" and since is None:
            since = []
        if since is not None and (event in _HEAVY or event == "taken"):
            since.append(event)
        if event == "aten.scaled_dot_product_attention":
            found.append(list(since))
        if event == "taken" and since and "aten.scaled_dot_product_attention" in since:
            since = None  # of the way back
    return found


_HEAVY = ("aten.addmm", "aten.gelu", "aten.scaled_dot_product_attention", "c10d.alltoall_base_")


@pytest.mark.parametrize("batch", [1, 2])
def test_attention_copies_each_tensor_once(batch):
    """Queries, keys and values into one exchange, the result out of the other: no fifth copy."""
    with world_of_one_process(0, 2) as world:
        layouts = Layouts(world)
        engine = NativeAttention(layouts.get(ULYSSES_2), "torch", layouts.traffic)
        call = engine.of_call(TokenPlan((0, 0), (TOKENS, TOKENS)))
        tensors = [torch.empty(batch, TOKENS, HEADS, CHANNELS, device=DEVICE) for _ in range(3)]
        with torch.inference_mode(), counted() as counter:
            call.attend(*tensors)
    sent = 4 * batch * SHARE
    assert counter.counts == Counts(5, copied_bytes=sent, collectives=2, sent_bytes=sent)


@pytest.mark.parametrize(("heads", "operators"), [(4, 5), (3, 9)])
def test_attention_of_comfyuis_modules_copies_each_tensor_once(heads, operators):
    """Heads that ranks do not divide take a copy for each rank, but of no more bytes."""

    def plain(q, k, v, heads, mask=None, **others):
        return F.scaled_dot_product_attention(q, k, v)

    with world_of_one_process(0, 2) as world:
        layouts = Layouts(world)
        layout = layouts.get(ULYSSES_2)
        tokens = BlockTokens(layout.sequence, (), layouts.traffic, counts={"img": 2 * TOKENS})
        tensors = [torch.empty(1, heads, TOKENS, CHANNELS, device=DEVICE) for _ in range(3)]
        with torch.inference_mode(), counted() as counter:
            attention = UnevenAttention(layout, tokens, ("img",))
            out = attention(plain, *tensors, heads, skip_reshape=True)
    assert out.shape == (1, TOKENS, heads * CHANNELS)
    copied, counts = 4 * TOKENS * heads * CHANNELS * 4, counter.counts
    assert (counts.operators, counts.copied_bytes, counts.collectives) == (operators, copied, 2)
