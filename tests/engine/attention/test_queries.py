"""Attention with its queries split over ranks: exact for any model that calls ComfyUI's attention, described or not."""

from __future__ import annotations

import copy
import functools

import pytest
import torch

from comfy_modules import CASES, import_comfyui_here
from module_references import Reference
from parallel_backend.engine.attention import queries
from parallel_backend.engine.comm.groups import Layouts
from parallel_backend.models.attention import AttentionCall
from parallel_backend.models.comfyui.tiny.weights import random
from parallel_backend.options import COMPILE_BACKEND, ComputeOptions
from parallel_backend.requests import ATTENTION, Placement
from parallel_backend.strategy import ParallelStrategy
from ranks import run_ranks
from undescribed_modules import UNDESCRIBED

EXACT = 1e-5  # relative to the largest value
ULYSSES_2, ULYSSES_3 = ParallelStrategy(ulysses_degree=2), ParallelStrategy(ulysses_degree=3)
# Models with each kind of mask, with grouped keys, and with sound next to video.
DESCRIBED = ("flux1 + full mask", "qwen-image + text mask", "krea2 + reference, gqa", "ltx-2 (video + sound)")


@pytest.fixture(autouse=True)
def few_tokens(monkeypatch):
    """A lower MIN_KEYS, because tiny models have fewer keys than the real limit."""
    monkeypatch.setattr(queries, "MIN_KEYS", 2)


@pytest.fixture(scope="module")
def reference():
    import_comfyui_here()

    @functools.cache
    def of(name, size=(1, 8, 8)):
        return Reference(*(UNDESCRIBED | CASES)[name], size)

    return of


@pytest.mark.parametrize("name", UNDESCRIBED)
def test_classes_that_nobody_described_give_the_answer_of_one_process(reference, name):
    one = reference(name)
    for strategy in (ULYSSES_2, ULYSSES_3):
        for ((worst, sent, notes),) in run_ranks(
            one.on_ranks, strategy.world_size, ATTENTION, Placement(strategy)
        ):
            assert worst <= EXACT
            assert sent > 0 and "share out the queries of attention" in notes[0]


@pytest.mark.parametrize("name", DESCRIBED)
def test_masks_and_shared_keys_of_other_classes_do_too(reference, name):
    for ((worst, sent, _),) in run_ranks(reference(name).on_ranks, 2, ATTENTION, Placement(ULYSSES_2)):
        assert worst <= EXACT and sent > 0


@pytest.mark.parametrize(
    "strategy",
    [
        ParallelStrategy(ulysses_degree=3, device_shares=(1.0, 3.0, 2.0)),
        ParallelStrategy(ring_degree=2),
        ParallelStrategy(ulysses_degree=2, cfg_degree=2),
    ],
    ids=["uneven devices", "ring", "with cfg"],
)
def test_other_layouts_of_the_sequence_axis(reference, strategy):
    one = reference("cosmos 1", (strategy.cfg_degree, 8, 8))
    for ((worst, sent, _),) in run_ranks(one.on_ranks, strategy.world_size, ATTENTION, Placement(strategy)):
        assert worst <= EXACT and sent > 0


def test_without_the_exchange_the_answer_is_another(reference):
    """Proves that the tolerance is tight enough to show a missing exchange."""
    one = reference("sdxl + controlnet")

    def apart(world):
        def with_zeros(mine, sizes, axis, traffic, dim):
            missing = list(mine.shape)
            missing[dim] = sum(sizes) - mine.shape[dim]
            return torch.cat([mine, mine.new_zeros(missing)], dim)

        queries.all_gather = with_zeros
        return one.on_ranks(world, ATTENTION, Placement(ULYSSES_2))[0][0]

    assert min(run_ranks(apart, 2)) > 100 * EXACT


def test_as_many_rows_as_ranks_go_whole_to_each(reference):
    one = reference("sd1.5", (2, 8, 8))
    for ((worst, sent, _),) in run_ranks(one.on_ranks, 2, ATTENTION, Placement(ULYSSES_2)):
        assert worst <= EXACT
        assert sent == one.answer.nbytes // 2  # its row of the answer, and nothing for attention


def test_attention_to_few_keys_stays_whole(reference, monkeypatch):
    monkeypatch.setattr(queries, "MIN_KEYS", 2048)
    for ((worst, sent, _),) in run_ranks(reference("sd1.5").on_ranks, 2, ATTENTION, Placement(ULYSSES_2)):
        assert worst <= EXACT and sent == 0


def test_a_call_leaves_no_attention_behind(reference):
    """The call also has compiled blocks, which must work together with split queries."""
    one = reference("qwen-image + text mask")

    def twice(world):
        placement = Placement(ULYSSES_2, compute_options=ComputeOptions("blocks"))
        compiled = one.on_ranks(world, ATTENTION, placement)[0][0]
        with torch.inference_mode():
            args, kwargs = copy.deepcopy((one.args, one.kwargs))
            alone = one.model.module(*args, **kwargs)
        return [compiled, torch.equal(alone, one.answer)]

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(COMPILE_BACKEND, "eager")
        for compiled, same in run_ranks(twice, 2):
            assert compiled <= EXACT and same


@pytest.mark.parametrize("rows", [2, 5])
def test_a_mask_that_may_be_of_rows_or_of_queries_is_not_cut(reference, rows):
    """In a mask [a, keys], `a` counts rows for some of ComfyUI's functions, and queries for others."""
    reference("sd1.5")
    seen = []

    def library(call):
        seen.append((call.q.shape[1], call.mask.shape[0]))
        return call.q

    def calls(world):
        attend = queries.QueryAttention(Layouts(world).get(ULYSSES_2), Layouts(world).traffic)
        q = random(rows, 5, 8)
        attend(library, AttentionCall(q, q, q, 2, mask=torch.ones(5, 5)))
        return [list(one) for one in seen]

    expected = [[5, 5], [5, 5]] if rows == 5 else [[2, 2], [3, 3]]
    assert sorted(one for (one,) in run_ranks(calls, 2)) == expected
