"""Attention over the tokens of all ranks equals attention in one process, for every form of mask that models give."""

import functools
from operator import methodcaller

import pytest
import torch

from parallel_backend.engine.attention import sequence
from parallel_backend.engine.attention.sequence import SequenceAttention
from parallel_backend.engine.comm.groups import Layouts
from parallel_backend.engine.comm.rounded import LEAST_CHANNELS, SCALE_BYTES
from parallel_backend.engine.tokens.block_tokens import BlockTokens
from parallel_backend.errors import RequestError
from parallel_backend.models.attention import AttentionCall
from parallel_backend.models.comfyui.tiny.weights import random
from parallel_backend.models.tokens.regions import Tokens
from parallel_backend.options import EXCHANGE_DTYPES
from parallel_backend.strategy import ParallelStrategy
from ranks import run_ranks
from stock_attention import optimized

EXACT = 1e-5
BATCH, HEADS, CHANNELS, TEXT, IMAGE = 2, 6, 8, 3, 10
TOTAL = TEXT + IMAGE
LAYOUTS = {
    "ulysses": ParallelStrategy(ulysses_degree=3),
    "ring": ParallelStrategy(ring_degree=3),
    "usp": ParallelStrategy(ring_degree=2, ulysses_degree=2),
    "uneven": ParallelStrategy(ulysses_degree=3, device_shares=(1.0, 2.0, 4.0)),
    "more ranks than heads": ParallelStrategy(ulysses_degree=4),
    "ulysses by groups of heads": ParallelStrategy(ulysses_degree=2, head_groups=2),
    "usp by groups of heads": ParallelStrategy(ring_degree=2, ulysses_degree=2, head_groups=4),
}


def answer(attention, *args, **kwargs):
    """Returns how `attention` answers a call of `optimized` with these arguments."""
    return attention(methodcaller("by", optimized), AttentionCall.of(*args, **kwargs))


def _masks():
    hidden = torch.rand(BATCH, TOTAL, generator=torch.Generator().manual_seed(1)) < 0.4
    hidden[:, -1] = False
    scores = random(BATCH, 1, TOTAL, TOTAL)
    return {
        "none": None,
        "of all pairs": scores[0, 0],
        "of all pairs by row": scores[:, 0],
        "of all pairs by head": random(BATCH, HEADS, TOTAL, TOTAL),
        "of keys": torch.zeros(BATCH, 1, 1, TOTAL).masked_fill(hidden[:, None, None], -torch.inf),
        "of keys, as flags": ~hidden[:, None, None],
    }


def _differences(world, strategy, heads, kv_heads):
    """Returns the difference for each form of call, relative to the largest value."""
    layouts = Layouts(world)
    layout = layouts.get(strategy)
    q, k, v = (random(BATCH, n, TOTAL, CHANNELS, seed=i) for i, n in enumerate((heads, kv_heads, kv_heads)))
    found = {}
    for name, mask in _masks().items():
        if mask is not None and mask.ndim == 4 and mask.shape[1] not in (1, heads):
            continue
        for local_mask in (False, True) if name.startswith("of keys") else (False,):
            for flat, scale in ((False, None), (True, 0.3)):
                tokens = BlockTokens(layout.sequence, layout.sequence_shares)
                tokens.cut(torch.empty(1, TEXT), Tokens("txt"))
                tokens.cut(torch.empty(1, IMAGE), Tokens("img"))

                def own(tensor, dim, tokens=tokens):
                    return tokens.cut(tensor, Tokens("txt+img", dim))

                others = {} if scale is None else {"scale": scale}
                mine, whole = [own(t, 2) for t in (q, k, v)], [q, k, v]
                if flat:
                    mine, whole = ([t.transpose(1, 2).flatten(2) for t in three] for three in (mine, whole))
                form = {"skip_reshape": not flat, "skip_output_reshape": not flat}
                given = own(mask, -1) if local_mask else mask
                attention = SequenceAttention(layout, tokens, ("txt+img",))
                out = answer(attention, *mine, heads, mask=given, **form, **others)
                expected = own(optimized(*whole, heads, mask=mask, **form, **others), 1 if flat else 2)
                out, expected = (tokens.local(t, "txt+img", 1 if flat else 2) for t in (out, expected))
                difference = (out - expected).abs().max() / expected.abs().max()
                found[f"{name}, {local_mask=}, {flat=}"] = difference.item()
    return found


HEADS_OF = [(6, 6), (6, 2), (3, 1)]  # heads of queries, heads of keys


@functools.cache
def _of_ranks(layout):
    """Returns the results of a layout's ranks for the tests below; the ranks are started only once."""
    strategy = LAYOUTS[layout]
    return run_ranks(_of_rank, strategy.world_size, strategy)


def _of_rank(world, strategy):
    return {
        "forms": [_differences(world, strategy, *heads) for heads in HEADS_OF],
        "rounded": [_exact_and_rounded(world, strategy, kv_heads, WIDE) for kv_heads in (6, 2)],
    }


@pytest.mark.xdist_group("attention_sequence")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_form_of_call_matches_one_rank(layout):
    for of_rank in _of_ranks(layout):
        for (heads, kv_heads), found in zip(HEADS_OF, of_rank["forms"], strict=True):
            off = {form: difference for form, difference in found.items() if not difference <= EXACT}
            assert off == {}, f"{heads} heads, {kv_heads} of keys"
            assert len(found) == (16 if heads == HEADS else 14)


def test_keys_that_heads_share_travel_once():
    def sent(world):
        layouts = Layouts(world)
        layout = layouts.get(ParallelStrategy(ulysses_degree=2))
        found = []
        for kv_heads in (6, 2):
            tokens = BlockTokens(layout.sequence, ())
            tokens.cut(torch.empty(1, 8), Tokens("x"))
            q, k = random(1, 6, 4, CHANNELS), random(1, kv_heads, 4, CHANNELS)
            before = layouts.traffic.bytes_sent
            answer(SequenceAttention(layout, tokens, ("x",)), q, k, k, 6, skip_reshape=True)
            found.append(layouts.traffic.bytes_sent - before)
        return found

    head = 4 * CHANNELS * 4  # bytes of four tokens of one head
    # A rank sends three heads of queries and of answers, and three heads, or one, of keys and of values.
    assert run_ranks(sent, 2) == [[(3 + 3 + 2 * 3) * head, (3 + 3 + 2 * 1) * head]] * 2


def _events_by_groups(world, groups):
    """Returns (True if overlapped and blocking exchanges agree, bytes sent, events) for `groups` groups of heads."""
    layouts = Layouts(world)
    layout = layouts.get(ParallelStrategy(ulysses_degree=2, head_groups=groups))
    tokens = BlockTokens(layout.sequence, ())
    q, k, v = (tokens.cut(random(BATCH, HEADS, TOTAL, CHANNELS, seed=i), Tokens("x", 2)) for i in range(3))
    events = []
    begin = sequence.start_all_to_all

    def watched(*args, **way):
        number = sum(event.startswith("begun") for event in events) + 1
        events.append(f"begun {number}")
        wait = begin(*args, **way)

        def arrive():
            events.append(f"awaited {number}")
            return wait()

        return arrive

    def attend(call):
        events.append("attended")
        return call.by(optimized)

    def blocking(*args, **way):
        arrived = begin(*args, **way)()
        return lambda: arrived

    form = {"skip_reshape": True, "skip_output_reshape": True}
    answers = []
    with pytest.MonkeyPatch.context() as patch:
        for way in (watched, blocking):
            patch.setattr(sequence, "start_all_to_all", way)
            attention = SequenceAttention(layout, tokens, ("x",))
            before = layouts.traffic.bytes_sent
            answers.append(attention(attend, AttentionCall(q, k, v, HEADS, **form)))
    return torch.equal(*answers), layouts.traffic.bytes_sent - before, events[: events.index("awaited 6") + 1]


def test_one_group_of_heads_is_attended_to_while_others_travel():
    equal, sent, events = zip(*run_ranks(_events_by_groups, 2, 3), strict=True)
    assert all(equal), "the same groups one after the other give another answer"
    assert events[0] == events[1]
    assert events[0] == [
        *("begun 1", "begun 2", "awaited 1", "attended", "begun 3"),  # 3 sends the first group's output back
        *("begun 4", "awaited 2", "attended", "begun 5"),
        *("awaited 4", "attended", "begun 6", "awaited 3", "awaited 5", "awaited 6"),
    ]
    # As with one group: half of the heads of q, k and v of this rank's tokens, and of the output for the other rank's.
    heads = HEADS // 2 * BATCH * CHANNELS * 4
    assert sent == ((3 * 7 + 6) * heads, (3 * 6 + 7) * heads)


def test_other_tokens_than_the_table_says_and_odd_heads_are_refused_before_anything_is_sent():
    def refused(world):
        layouts = Layouts(world)
        layout = layouts.get(ParallelStrategy(ulysses_degree=2))
        tokens = BlockTokens(layout.sequence, ())
        tokens.cut(torch.empty(1, 8), Tokens("x"))
        q = random(1, HEADS, 7, CHANNELS)
        with pytest.raises(RequestError, match="7 tokens of x where 4 belong"):
            answer(SequenceAttention(layout, tokens, ("x",)), q, q, q, HEADS, skip_reshape=True)
        q, k, v = (random(1, heads, 4, CHANNELS) for heads in (HEADS, 3, 2))
        with pytest.raises(RequestError, match="3 heads of keys and 2 of values"):
            answer(SequenceAttention(layout, tokens, ("x",)), q, k, v, HEADS, skip_reshape=True)
        return layouts.traffic.bytes_sent

    assert run_ranks(refused, 2) == [0, 0]


WIDE = 32  # channels of a rounded head: 36 bytes with its scale, instead of 128


def _exact_and_rounded(world, strategy, kv_heads, channels):
    """Returns (largest difference relative to the largest value, bytes sent without rounding, bytes sent with it)."""
    layouts = Layouts(world)
    layout = layouts.get(strategy)
    q, k, v = (random(BATCH, n, TOTAL, channels, seed=i) for i, n in enumerate((HEADS, kv_heads, kv_heads)))
    found, sent = [], []
    for exchange_dtype in EXCHANGE_DTYPES:
        tokens = BlockTokens(layout.sequence, layout.sequence_shares)
        tokens.cut(torch.empty(1, TEXT), Tokens("txt"))
        tokens.cut(torch.empty(1, IMAGE), Tokens("img"))
        mine = [tokens.cut(t, Tokens("txt+img", 2)) for t in (q, k, v)]
        before = layouts.traffic.bytes_sent
        attention = SequenceAttention(layout, tokens, ("txt+img",), exchange_dtype=exchange_dtype)
        out = answer(attention, *mine, HEADS, skip_reshape=True, skip_output_reshape=True)
        found.append(tokens.local(out, "txt+img", 2))
        sent.append(layouts.traffic.bytes_sent - before)
    exact, rounded = found
    difference = (rounded - exact).abs().max() / exact.abs().max() if exact.numel() else torch.zeros(())
    return difference.item(), *sent


@pytest.mark.xdist_group("attention_sequence")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_ranks_send_each_other_is_rounded_where_that_is_wished(layout):
    for results in zip(*(of_rank["rounded"] for of_rank in _of_ranks(layout)), strict=True):
        assert 1e-4 < max(difference for difference, _, _ in results) < 0.1
        for _, exact, rounded in results:
            assert rounded * 4 * WIDE == exact * (WIDE + SCALE_BYTES)


def test_heads_too_narrow_for_a_scale_of_their_own_are_sent_as_they_are():
    narrow = LEAST_CHANNELS - 1
    for difference, exact, rounded in run_ranks(_exact_and_rounded, 3, LAYOUTS["ulysses"], 6, narrow):
        assert difference == 0.0 and exact == rounded > 0
