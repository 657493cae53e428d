"""xfuser's attention in blocks of several families: it is exact, and native computes what it cannot, with a note."""

import importlib
from functools import partial
from importlib.util import find_spec

import pytest

from comfy_modules import CASES, UNETS, import_comfyui_here
from module_references import Reference
from parallel_backend.engine.attention.compat_xfuser import load_xfuser
from parallel_backend.engine.comm.groups import Layouts
from parallel_backend.engine.module_forward import make_module_forward
from parallel_backend.models.comfyui.tiny.cases import build_tiny, tiny_inputs
from parallel_backend.requests import STAY, Placement
from parallel_backend.strategy import ParallelStrategy
from ranks import run_ranks

EXACT = 1e-5  # relative to the largest value
EVEN, ODD = (1, 8, 8), (2, 9, 7)  # rows, height, width; only the tokens of the first divide evenly
# Models that xfuser computes under any strategy, and those of unlike blocks among them, for the products of axes.
BY_XFUSER = {
    2: ["flux1 + reference", "flux1 + controlnet", "wan2.2 t per frame", "qwen-image", "sd3.5 medium"],
    4: ["flux1 + controlnet", "wan2.2 t per frame", "sd3.5 medium"],
}
# What it leaves to native: (the model and its inputs, number of ranks, reason in the note).
BY_NATIVE = {
    "a mask": (CASES["flux1 + full mask"], 2, "it computes no attention masks"),
    "heads that do not divide": (
        (partial(build_tiny, "wan", num_heads=2), tiny_inputs("wan")),
        3,
        "its Ulysses needs heads that divide",
    ),
    "a UNet": (UNETS["sdxl"], 2, "the blocks of UNetModel are not described"),
}
STRATEGIES = {
    2: [ParallelStrategy(ulysses_degree=2), ParallelStrategy(ring_degree=2)],
    4: [
        ParallelStrategy(ring_degree=2, ulysses_degree=2),
        ParallelStrategy(cfg_degree=2, ulysses_degree=2),
    ],
}


@pytest.fixture(scope="module", autouse=True)
def _comfyui():
    if find_spec("xfuser") is None:  # not imported: without a GPU that needs changes (compat_xfuser.py)
        pytest.skip("xfuser is not installed")
    import_comfyui_here()


def computed(world, strategies, references):
    """Returns (difference, engine, notes) for each call on this rank. The strategies take turns: xfuser has one set of
    groups per process."""
    layouts, found = Layouts(world), []
    for reference in references:
        forwards = [
            make_module_forward(reference.model, layouts, Placement(strategy, "xfuser"))
            for strategy in strategies
        ]
        found += [
            (reference.difference(forward, reference.mode), forward.engine, forward.notes)
            for forward in forwards  # a change of the strategy makes all groups anew
        ]
    return found


@pytest.mark.parametrize("ranks", STRATEGIES)
def test_xfuser_gives_what_one_process_gives_in_each_family_as_strategies_take_turns(ranks):
    references, strategies = [Reference(*CASES[name], ODD) for name in BY_XFUSER[ranks]], STRATEGIES[ranks]
    assert {reference.mode for reference in references} == {STAY}
    for of_rank in run_ranks(computed, ranks, strategies, references, backend="gloo"):
        assert [engine for _, engine, _ in of_rank] == ["xfuser"] * len(references) * len(strategies)
        assert max(far for far, *_ in of_rank) <= EXACT


@pytest.mark.parametrize("what", BY_NATIVE)
def test_what_xfuser_cannot_compute_native_does_and_a_note_says_so(what):
    case, ranks, reason = BY_NATIVE[what]
    strategy, reference = ParallelStrategy(ulysses_degree=ranks), Reference(*case, EVEN)
    for of_rank in run_ranks(computed, ranks, [strategy], [reference], backend="gloo"):
        for far, engine, notes in of_rank:
            assert far <= EXACT and engine == "native"
            assert [note for note in notes if note.startswith(f"engine xfuser fell back to native: {reason}")]


def test_ranks_on_the_cpu_need_no_gpu_where_torch_is_built_for_cuda():
    assert run_ranks(joins_as_with_cuda, 2, backend="gloo") == [True, True]


def joins_as_with_cuda(world):
    xfuser = load_xfuser(on_cpu=True)
    envs = importlib.import_module("xfuser.envs")
    vars(envs)["get_device_name"] = lambda: "cuda"
    xfuser.distributed.init_distributed_environment(
        rank=world.rank, world_size=world.world_size, local_rank=0, backend="gloo"
    )
    return xfuser.distributed.get_world_group().world_size == world.world_size
