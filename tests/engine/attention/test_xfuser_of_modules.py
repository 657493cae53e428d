"""xfuser's attention in the blocks of every family: exact where it computes, native and a note where it cannot."""

from importlib.util import find_spec

import pytest

from comfy_modules import CASES, UNETS, import_comfyui_here
from module_references import Reference
from parallel_backend.engine.comm.groups import Layouts
from parallel_backend.engine.module_forward import make_module_forward
from parallel_backend.requests import BLOCK, STAY, Placement
from parallel_backend.strategy import ParallelStrategy
from ranks import run_ranks

EXACT = 1e-5  # of the largest value
EVEN, ODD = (2, 8, 8), (2, 9, 7)  # tokens that divide, and that do not
# What xfuser computes of each, under any strategy.
BY_XFUSER = [
    "flux1",
    "flux1 + reference",
    "flux1 + controlnet",
    "wan2.1 t2v",
    "wan2.2 t per frame",
    "qwen-image",
    "sd3.5 medium",
]
BY_NATIVE = {
    "flux1 + full mask": "it computes no attention masks",
    "krea2 + reference, gqa": "its Ulysses needs heads that divide",
    "sdxl": "the blocks of UNetModel are not described",
}
STRATEGIES = [
    ParallelStrategy(ulysses_degree=2),
    ParallelStrategy(ring_degree=2),
    ParallelStrategy(ring_degree=2, ulysses_degree=2),
    ParallelStrategy(cfg_degree=2, ulysses_degree=2),
]


@pytest.fixture(scope="module", autouse=True)
def _comfyui():
    if find_spec("xfuser") is None:  # it needs help to be imported without a GPU
        pytest.skip("xfuser is not installed")
    import_comfyui_here()


def computed(world, strategy, references):
    """[(difference, engine, notes)] of each call on this rank, strategies in turns on the same groups."""
    layouts, found = Layouts(world), []
    for reference in references:
        forward = make_module_forward(reference.model, layouts, Placement(strategy, "xfuser"))
        for tokens in (
            dict.fromkeys((reference.mode, BLOCK)) if reference.mode in (STAY, BLOCK) else [reference.mode]
        ):
            found.append((reference.difference(forward, tokens), forward.engine, forward.notes))
    return found


@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda s: s.describe())
def test_xfuser_gives_what_one_process_gives_in_each_family(strategy):
    references = [Reference(*CASES[name], ODD) for name in BY_XFUSER]
    for of_rank in run_ranks(computed, strategy.world_size, strategy, references, backend="gloo"):
        assert [engine for _, engine, _ in of_rank] == ["xfuser"] * 2 * len(BY_XFUSER)
        assert max(far for far, *_ in of_rank) <= EXACT


def test_what_xfuser_cannot_compute_native_does_and_a_note_says_so():
    cases = CASES | UNETS
    references = [Reference(*cases[name], EVEN if name in UNETS else ODD) for name in BY_NATIVE]
    strategy = ParallelStrategy(ulysses_degree=2)
    for of_rank in run_ranks(_notes, 2, strategy, references, backend="gloo"):
        for (far, engine, notes), reason in zip(of_rank, BY_NATIVE.values(), strict=True):
            assert far <= EXACT and engine == "native"
            assert [note for note in notes if note.startswith(f"engine xfuser fell back to native: {reason}")]


def _notes(world, strategy, references):
    layouts = Layouts(world)
    forwards = [make_module_forward(one.model, layouts, Placement(strategy, "xfuser")) for one in references]
    pairs = zip(references, forwards, strict=True)
    return [(one.difference(forward, one.mode), forward.engine, forward.notes) for one, forward in pairs]


def taking_turns(world, reference):
    """Differences of calls under two strategies in turns: xfuser has its groups once per process."""
    layouts = Layouts(world)
    forwards = [
        make_module_forward(reference.model, layouts, Placement(strategy, "xfuser"))
        for strategy in (ParallelStrategy(ulysses_degree=2), ParallelStrategy(ring_degree=2))
    ]
    return [reference.difference(forward, STAY) for forward in (*forwards, *forwards)]


def test_strategies_take_turns():
    assert (
        max(
            max(of_rank)
            for of_rank in run_ranks(taking_turns, 2, Reference(*CASES["flux1"], ODD), backend="gloo")
        )
        <= EXACT
    )
