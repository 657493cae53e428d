"""Compiled blocks of ComfyUI's own modules give the answers of uncompiled blocks, on one rank and on several."""

from __future__ import annotations

import copy

import pytest
import torch

from comfy_modules import CASES, UNETS
from differences import relative_difference
from module_references import tiny_model
from parallel_backend.engine.blocks import compile as compiling
from parallel_backend.engine.blocks.step_cache import ModuleCache
from parallel_backend.engine.comm.groups import Layouts
from parallel_backend.engine.module_forward import make_module_forward
from parallel_backend.models.comfyui import attention_router as router
from parallel_backend.options import COMPILE_BACKEND, ROUNDED, ComputeOptions
from parallel_backend.requests import BLOCK, ROWS, STAY, ModuleCall, Placement
from parallel_backend.strategy import ParallelStrategy
from ranks import run_ranks

EXACT = 1e-5  # relative to the largest value
COMPILED = ComputeOptions("blocks")
ONE, MORE = (2, 9, 7), (2, 10, 6)  # rows, latent height and width
OPTIONS = {"cond_or_uncond": [0, 1], "sigmas": torch.tensor([0.5]), "sample_sigmas": torch.linspace(1, 0, 5)}
ULYSSES, RING, CFG = (
    ParallelStrategy(**{name: 2}) for name in ("ulysses_degree", "ring_degree", "cfg_degree")
)

pytestmark = pytest.mark.usefixtures("comfyui_here")


@pytest.fixture(autouse=True)
def without_inductor(monkeypatch):
    """The backend eager: torch traces blocks and guards the graphs, and runs the graphs without compiling kernels."""
    monkeypatch.setenv(COMPILE_BACKEND, "eager")


@torch.inference_mode()
def compiled_and_plain(world, case, calls):
    """Returns for each (strategy, size, token mode, exchange dtype or nothing) [difference of compiled from uncompiled
    blocks relative to the largest value, new graphs, calls that ran uncompiled, notes]."""
    build, inputs = case
    model, layouts, found = tiny_model(build), Layouts(world), []
    for strategy, size, tokens, *exchange_dtype in calls:
        plain, compiled = (
            make_module_forward(
                model,
                layouts,
                Placement(strategy, compute_options=ComputeOptions(compile, "auto", *exchange_dtype)),
            )
            for compile in ("off", "blocks")
        )
        args, kwargs = inputs(*size)
        kwargs["transformer_options"] = dict(OPTIONS)
        expected, answer = (
            forward(ModuleCall(*copy.deepcopy((args, kwargs)), size[0], tokens))
            for forward in (plain, compiled)
        )
        notes = [*compiled.notes, *compiling.compiler().notes()]
        done = compiling.compiler().take()
        assert not any("forward" in part.__dict__ for part in model.module.modules()), (
            "a call leaves no trace"
        )
        found.append([relative_difference(answer, expected), done.graphs, done.uncompiled, notes])
    return found


def assert_exact(found):
    assert max(difference for difference, *_ in found) <= EXACT
    assert not any(uncompiled or notes for _, _, uncompiled, notes in found)


# A model with two streams and a mask, and one whose first block gets tokens with other strides than the next block.
@pytest.mark.parametrize("name", ["qwen-image + text mask", "wan2.1 i2v"])
def test_ranks_that_meet_in_attention_share_one_graph_of_all_blocks(name):
    calls = [
        (ULYSSES, ONE, STAY),
        (RING, ONE, STAY),
        (ULYSSES, ONE, BLOCK),
        (ULYSSES, MORE, STAY),
        (CFG, (2, 8, 8), ROWS),
        (ULYSSES, ONE, STAY),
        (ULYSSES, ONE, STAY, ROUNDED),
        (RING, ONE, STAY, ROUNDED),
    ]
    for *found, by_ulysses, by_ring in run_ranks(compiled_and_plain, 2, CASES[name], calls):
        assert_exact(found)
        first, ring, block, more, _, again = (graphs for _, graphs, *_ in found)
        assert (first, ring, block, more, again) == (1, 0, 0, 1, 0)
        for difference, graphs, uncompiled, notes in (by_ulysses, by_ring):
            assert difference <= EXACT and not graphs and not uncompiled
            assert ["exchange_dtype fp8" in note for note in notes] == [True]


def test_blocks_with_guides_of_other_strengths_compile():
    """The mask of the guides is not a tensor, and stays outside the graph."""
    for found in run_ranks(
        compiled_and_plain, 2, CASES["ltx, guides of strengths"], [(ULYSSES, (1, 8, 8), STAY)]
    ):
        assert_exact(found)
        assert found[0][1] == 1


def test_heads_in_other_places_of_keys_and_blocks_of_several_forms_compile():
    (found,) = run_ranks(compiled_and_plain, 1, CASES["sd3.5 medium"], [(ParallelStrategy(), ONE, ROWS)])
    assert_exact(found)
    assert found[0][1] == 3  # blocks with image-only attention, blocks without, and the last one


def test_what_torch_cannot_make_one_graph_of_runs_as_it_is_and_is_said():
    calls = [(ParallelStrategy(), size, ROWS) for size in (ONE, ONE)]
    (found,) = run_ranks(compiled_and_plain, 1, CASES["hunyuan 3d 2.1"], calls)
    for difference, _, uncompiled, notes in found:
        assert difference <= EXACT and uncompiled > 0
        assert len(notes) == 1 and "cannot make one graph of them" in notes[0]
    assert found[1][1] == 0  # it is not tried again


@pytest.mark.parametrize(
    ("case", "strategy", "tokens", "said"),
    [
        (UNETS["sdxl + controlnet"], CFG, ROWS, "which parts of UNetModel are its blocks is not described"),
        (CASES["humo"], ULYSSES, STAY, "processes meet inside of them outside of attention"),
    ],
    ids=["nobody knows its blocks", "sound for each frame"],
)
def test_blocks_that_are_not_compiled_are_named(case, strategy, tokens, said):
    for (difference, graphs, _, notes), *_ in run_ranks(
        compiled_and_plain, 2, case, [(strategy, (2, 8, 8), tokens)]
    ):
        assert difference <= EXACT and graphs == 0
        assert len(notes) == 1 and said in notes[0]


def reused(world, options):
    """Returns (answers to a call and to its repetition under a step cache, reused calls, number of graphs)."""
    build, inputs = CASES["wan2.1 t2v"]
    model, cache = tiny_model(build), ModuleCache(0.01)
    forward = make_module_forward(model, Layouts(world), Placement(compute_options=options))
    args, kwargs = inputs(*ONE)
    call = ModuleCall(args, kwargs | {"transformer_options": dict(OPTIONS)}, ONE[0], STAY)
    with torch.inference_mode():
        found = [forward(copy.deepcopy(call), cache) for _ in range(2)]
    return found, cache.reused, compiling.compiler().take().graphs if forward.compiles else 0


def test_a_step_cache_leaves_compiled_blocks_out_too():
    plain, compiled = (run_ranks(reused, 1, options)[0] for options in (ComputeOptions(), COMPILED))
    assert plain[1:] == (1, 0) and compiled[1:] == (1, 1)
    for one, other in zip(compiled[0], plain[0], strict=True):
        assert relative_difference(one, other) <= EXACT


@pytest.mark.parametrize("wants_own", [True, False])
def test_a_compiled_block_hands_on_the_attention_that_its_file_wants(monkeypatch, wants_own):
    """ComfyUI 0.38 has a module for the attention of a file; its function is None if the device cannot run it."""
    from comfy.ldm.modules import attention

    class Wanted(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.config, self.function = {"attention": "test_int8"}, (other if wants_own else None)

    def other(q, k, v, heads, **kwargs):
        return 2 * v

    def stock(q, k, v, heads, preferred_attention=None, **kwargs):
        return v + 0 if preferred_attention is None else preferred_attention.function(q, k, v, heads)

    monkeypatch.setitem(attention.REGISTERED_ATTENTION_FUNCTIONS, "test_int8", other)
    routed = router._routed("optimized_attention", stock)
    monkeypatch.setattr(attention, "optimized_attention", routed)
    wanted, x = Wanted(), torch.randn(1, 6, 8)
    compiled = torch.compile(
        lambda x: routed(x, x, x, 2, preferred_attention=wanted) + 1, backend="eager", fullgraph=True
    )
    with torch.inference_mode():
        assert torch.equal(compiled(x), (2 * x if wants_own else x) + 1)
