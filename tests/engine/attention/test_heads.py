"""Attention with its heads split over ranks: every form of call gives the answer of one process."""

import functools
from dataclasses import replace
from operator import methodcaller

import pytest
import torch

from parallel_backend.engine.attention import queries
from parallel_backend.engine.comm.groups import Layouts
from parallel_backend.models.attention import AttentionCall
from parallel_backend.models.comfyui.tiny.weights import random
from parallel_backend.requests import HeadTrial
from parallel_backend.strategy import ParallelStrategy
from ranks import run_ranks
from stock_attention import optimized

HEADS, CHANNELS, TOKENS, KEYS = 6, 4, 3, 5
LAYOUTS = {
    "two ranks": ParallelStrategy(ulysses_degree=2),
    "uneven": ParallelStrategy(ring_degree=2, device_shares=(1.0, 2.0)),
}
# Heads of keys, heads of values, channels of a head of values, and the heads that the two ranks then compute.
CALLS = {
    "a key for each head": (6, 6, CHANNELS, {"two ranks": [3, 3], "uneven": [2, 4]}),
    "wider values": (6, 6, 2 * CHANNELS, {"two ranks": [3, 3], "uneven": [2, 4]}),
    "keys of two heads each": (3, 3, CHANNELS, {"two ranks": [4, 2], "uneven": [2, 4]}),
    "keys of three heads each": (2, 2, CHANNELS, {"two ranks": [3, 3], "uneven": [3, 3]}),
    "fewer keys than ranks": (1, 1, CHANNELS, {"two ranks": [6, 6], "uneven": [6, 6]}),
    "fewer values than keys": (6, 2, CHANNELS, {"two ranks": [6, 6], "uneven": [6, 6]}),
}


def _calls(world, strategy):
    """Returns {(call, *form): (heads that this rank computed, largest difference from one process)}."""
    queries.MIN_KEYS = 1
    layouts, found = Layouts(world), {}
    for name, (key_heads, value_heads, width, _) in CALLS.items():
        q = random(2, HEADS, TOKENS, CHANNELS)
        k, v = random(2, key_heads, KEYS, CHANNELS), random(2, value_heads, KEYS, width)
        for form in ((False, False), (True, False), (True, True)):
            if width != CHANNELS and not form[0]:
                continue  # ComfyUI's functions take such values only by heads
            given = (q, k, v) if form[0] else [t.transpose(1, 2).flatten(2) for t in (q, k, v)]
            mask = random(2, HEADS, TOKENS, KEYS)
            call = AttentionCall(*given, HEADS, mask, None, *form, options={"enable_gqa": key_heads != HEADS})
            computed = []

            def library(part, computed=computed):
                computed.append(part.heads)
                return part.by(optimized)

            out = queries.HeadAttention(layouts.get(strategy))(library, call)
            expected = call.by(optimized)
            assert out.shape == expected.shape
            found[(name, *form)] = *computed, (out - expected).abs().max().item()
    return found


@functools.cache
def _of_ranks(layout):
    return run_ranks(_calls, 2, LAYOUTS[layout])


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_heads_that_share_keys_stay_together_and_odd_ones_are_computed_by_every_rank(layout, name):
    for form in ((False, False), (True, False), (True, True)):
        results = [of_rank[key] for of_rank in _of_ranks(layout) if (key := (name, *form)) in of_rank]
        assert [heads for heads, _ in results] in ([], CALLS[name][3][layout])
        assert all(difference < 1e-6 for _, difference in results)
    assert results


def test_a_call_within_a_call_and_one_to_few_keys_are_not_split():
    def calls(world):
        layouts = Layouts(world)
        layout, computed = layouts.get(LAYOUTS["two ranks"]), []
        q = random(1, HEADS, TOKENS, CHANNELS)
        call = AttentionCall(q, q, q, HEADS, skip_reshape=True)

        def within(part):
            computed.append(part.heads)
            return attention(methodcaller("by", optimized), part)

        attention = queries.HeadAttention(layout)
        queries.MIN_KEYS = TOKENS
        out = attention(within, call)
        queries.MIN_KEYS = TOKENS + 1
        few = attention(within, call)
        return computed, [torch.equal(out, few), (out - call.by(optimized)).abs().max().item() < 1e-6]

    for computed, same in run_ranks(calls, 2):
        assert computed[0] == 3 and computed[1] == HEADS and same[1]


def _louder(part):
    """Attention whose heads differ by their number."""
    factors = torch.linspace(0.9, 1.1, part.heads)
    q = part.q * factors[:, None, None] if part.skip_reshape else part.q * factors.repeat_interleave(CHANNELS)
    return replace(part, q=q).by(optimized)


@pytest.mark.parametrize("form", [(False, False), (True, False), (True, True)], ids=str)
@pytest.mark.parametrize(("library", "differs"), [(methodcaller("by", optimized), False), (_louder, True)])
def test_a_trial_tells_whether_attention_computes_head_by_head_and_gives_what_one_process_gives(
    form, library, differs
):
    def tries(world):
        queries.MIN_KEYS = 1
        q = random(2, HEADS, TOKENS, CHANNELS)
        given = q if form[0] else q.transpose(1, 2).flatten(2)
        call, trial = AttentionCall(given, given, given, HEADS, None, None, *form), HeadTrial()
        attention = queries.HeadAttention(Layouts(world).get(LAYOUTS["uneven"]), trial)
        return torch.equal(attention(library, call), library(call)), trial.differs

    assert run_ranks(tries, 2) == [(True, differs)] * 2
