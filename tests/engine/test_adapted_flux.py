"""diffusers' Flux in the pack's engine: every strategy gives what ComfyUI's own module gives in one process."""

import functools

import pytest
import torch

from adapted_flux import CALLS, SIZES, WIDTH, adapted, comfyui_flux
from comfy_modules import import_comfyui_here
from differences import relative_difference
from module_references import difference_of_patches, make_others
from parallel_backend.engine.blocks import compile as compiling
from parallel_backend.engine.blocks.step_cache import ModuleCache
from parallel_backend.engine.comm.groups import Layouts
from parallel_backend.engine.module_forward import make_module_forward
from parallel_backend.engine.sharding import ByteSharding
from parallel_backend.engine.stages.owners import pack
from parallel_backend.engine.stages.stale_keys import StaleKeyCache
from parallel_backend.engine.tensor_parallel import slices_of
from parallel_backend.models.base import ModelPart
from parallel_backend.models.diffusers.checkpoint import inspect_flux
from parallel_backend.models.tokens.table import token_mode
from parallel_backend.options import COMPILE_BACKEND, ComputeOptions
from parallel_backend.requests import BLOCK, STAY, ModuleCall, Placement
from parallel_backend.sampling.image_patches import ElementPatches
from parallel_backend.strategy import ParallelStrategy
from ranks import run_ranks
from tests.closed_forms.traffic import expected_bytes
from tests.closed_forms.weights_traffic import tensor_bytes
from tiny_flux import write_tiny_flux

EXACT = 1e-5  # relative to the largest value
STRATEGIES = {
    2: [
        ParallelStrategy(ulysses_degree=2),
        ParallelStrategy(ulysses_degree=2, sends_tokens=True),
        ParallelStrategy(ulysses_degree=2, sends_tokens=True, head_groups=2, device_shares=(2.0, 1.0)),
        ParallelStrategy(ulysses_degree=2, shard_weights=True, sends_tokens=True),
        ParallelStrategy(ulysses_degree=2, shard_weights=True),
        ParallelStrategy(ulysses_degree=2, device_shares=(1, 1000)),
        ParallelStrategy(ring_degree=2),
        ParallelStrategy(ring_degree=2, device_shares=(1000, 1)),
        ParallelStrategy(cfg_degree=2),
        ParallelStrategy(data_degree=2),
        ParallelStrategy(pipefusion_degree=2),
        ParallelStrategy(pipefusion_degree=2, device_shares=(1.0, 3.0)),
        ParallelStrategy(tensor_degree=2),
    ],
    3: [ParallelStrategy(ulysses_degree=3), ParallelStrategy(ring_degree=3)],
    4: [
        ParallelStrategy(ring_degree=2, ulysses_degree=2),
        ParallelStrategy(ring_degree=2, ulysses_degree=2, sends_tokens=True),
        ParallelStrategy(cfg_degree=2, ulysses_degree=2, device_shares=(3, 1, 1, 2)),
        ParallelStrategy(cfg_degree=2, ring_degree=2, shard_weights=True),
        ParallelStrategy(pipefusion_degree=2, cfg_degree=2),
        ParallelStrategy(pipefusion_degree=2, ring_degree=2, device_shares=(1, 1, 1, 30)),
        ParallelStrategy(tensor_degree=2, ulysses_degree=2),
        ParallelStrategy(tensor_degree=2, ring_degree=2, device_shares=(3, 3, 1, 1)),
        ParallelStrategy(tensor_degree=2, cfg_degree=2),
    ],
}
ALL = [strategy for of_size in STRATEGIES.values() for strategy in of_size]
NO_TOKENS = ParallelStrategy(ring_degree=2)  # for rank 1, if each sequence is one token
ALL_CALLS = STRATEGIES[2][:2]
SOME_CALLS = ["odd sides", "three texts of one token", "single tokens"]


@pytest.fixture(scope="module")
def subject(tmp_path_factory):
    """Returns (path of the weights, {call: the answer of ComfyUI's module})."""
    import_comfyui_here()
    path = write_tiny_flux(tmp_path_factory.mktemp("adapted") / "flux.safetensors", **SIZES)
    theirs = comfyui_flux(path)
    with torch.inference_mode():
        return str(path), {name: theirs(*made[0], **made[1]) for name in CALLS for made in [CALLS[name]()]}


@pytest.fixture(scope="module")
def results_of(subject):
    """Returns a function that gives each rank's `answers` under all strategies of a number of ranks."""
    return functools.cache(lambda ranks: run_ranks(answers, ranks, subject[0], STRATEGIES[ranks]))


def loaded(path, layouts, strategy):
    layout = layouts.get(strategy)
    shares = layout.stage_shares if strategy.pipefusion_degree > 1 else (1.0,)
    sharding = None
    if strategy.shard_weights:
        sharding = ByteSharding(layout.shard, layouts.world.device, offload=False)
    part = ModelPart(layout.pipe.index, shares, slices_of(layout.tensor, layouts), byte_sharding=sharding)
    return adapted(path, part)


def module_call(name, tokens=None):
    args, kwargs = CALLS[name]()
    return ModuleCall(args, kwargs, len(args[0]), tokens or token_mode("DiffusersFlux", kwargs))


def calls_of(strategy):
    """Returns (name, token mode) of each call to make under a strategy."""
    only_one_way = strategy.row_degree > 1 or strategy.tensor_degree > 1 or strategy.sends_tokens
    modes = (STAY,) if only_one_way else (STAY, BLOCK)
    return [(name, mode) for name in (CALLS if strategy in ALL_CALLS else SOME_CALLS) for mode in modes]


@torch.inference_mode()
def answers(world, path, strategies):
    """Returns this rank's {strategy: {(call, token mode): (answer, bytes sent, True if a repeated call is equal)}}."""
    layouts, found = Layouts(world), {}
    for strategy in strategies:
        forward = make_module_forward(loaded(path, layouts, strategy), layouts, Placement(strategy))
        of_calls = found[name_of(strategy)] = {}
        for name, mode in calls_of(strategy):
            before = forward.bytes_sent
            answer = forward(module_call(name, mode)).clone()
            sent = forward.bytes_sent - before
            is_same = name != "odd sides" or torch.equal(forward(module_call(name, mode)), answer)
            of_calls[name, mode] = answer, sent, is_same
    return found


def name_of(strategy):
    return f"{strategy.describe()}, {strategy.device_shares}, {strategy.head_groups}, {strategy.sends_tokens}"


@pytest.mark.parametrize("strategy", ALL, ids=name_of)
@pytest.mark.xdist_group("adapted_flux")
def test_every_strategy_gives_the_answer_of_comfyuis_module_on_each_rank_and_each_time(
    results_of, subject, strategy
):
    path, expected = subject
    of_ranks = [found[name_of(strategy)] for found in results_of(strategy.world_size)]
    for rank, found in enumerate(of_ranks):
        assert list(found) == calls_of(strategy)
        for (name, mode), (answer, sent, is_same) in found.items():
            far = relative_difference(answer, expected[name])
            assert far <= EXACT, f"rank {rank}, {name}, tokens {mode}: {far:.1e}"
            assert is_same and torch.equal(answer, of_ranks[0][name, mode][0]), f"rank {rank}, {name}"
            if mode == STAY and name in SOME_CALLS and has_closed_form(strategy):
                assert sent == closed_form(path, strategy, rank, name), f"rank {rank}, {name}"


def has_closed_form(strategy):
    """Returns True if ranks only send tokens for attention, sums of slices and answers, and heads divide evenly."""
    divides = SIZES["heads"] % strategy.ulysses_degree == 0
    return divides and not strategy.device_shares and strategy.pipefusion_degree == 1 and not strategy.shards


def closed_form(path, strategy, rank, name):
    args, kwargs = CALLS[name]()
    rows, _, height, width = args[0].shape
    size = {
        "rows": rows,
        "text": kwargs["context"].shape[1],
        "image": -(-height // 2) * -(-width // 2),
    }
    return tensor_bytes(strategy, rank, inspect_flux(path).dims, **size) + expected_bytes(
        strategy,
        rank,
        layers=SIZES["double_blocks"] + SIZES["single_blocks"],
        apart=SIZES["double_blocks"],
        hidden=WIDTH,
        latent_elements=16 * height * width,
        patch_channels=WIDTH,  # tokens are gathered before the last layer
        **size,
    )


@torch.inference_mode()
def compiled(world, path):
    """Returns (the answer of compiled blocks, blocks that ran uncompiled)."""
    layouts, placement = Layouts(world), Placement(NO_TOKENS, "native", ComputeOptions("blocks"))
    forward = make_module_forward(loaded(path, layouts, NO_TOKENS), layouts, placement)
    return forward(module_call("single tokens")), compiling.compiler().take().uncompiled


def test_compiled_blocks_where_a_rank_has_no_tokens(subject, monkeypatch):
    monkeypatch.setenv(COMPILE_BACKEND, "eager")
    path, expected = subject
    for answer, uncompiled in run_ranks(compiled, 2, path):
        assert uncompiled == 0 and relative_difference(answer, expected["single tokens"]) <= EXACT


@torch.inference_mode()
def cached(world, path, strategy):
    """Returns (answers under a step cache to calls of which some are alike, the number of reused calls)."""
    layouts, (args, kwargs), cache = Layouts(world), CALLS["single tokens"](), ModuleCache(0.2)
    forward = make_module_forward(loaded(path, layouts, strategy), layouts, Placement(strategy))
    calls = [ModuleCall((times * args[0], args[1]), kwargs, 1, STAY) for times in (1.0, -1.0, -0.9, 1.0)]
    return torch.stack([forward(one, cache) for one in calls]), cache.reused


def test_the_step_cache_where_a_rank_has_no_tokens(subject):
    ((expected, reused),) = run_ranks(cached, 1, subject[0], ParallelStrategy())
    assert 0 < reused < 3
    for found, reused_there in run_ranks(cached, 2, subject[0], NO_TOKENS):
        assert reused_there == reused and relative_difference(found, expected) <= EXACT


@torch.inference_mode()
def patches(world, path, name, count):
    """Returns the differences of patches that find keys of the same call, and of patches that find other keys."""
    strategy, layouts = ParallelStrategy(pipefusion_degree=2), Layouts(world)
    forward = make_module_forward(loaded(path, layouts, strategy), layouts, Placement(strategy))
    keys = StaleKeyCache()
    whole, stages = forward(module_call(name), keys=keys), forward.stages
    assert not stages.flow_blocked_by(module_call(name), keys)
    split = ElementPatches(stages.owners(module_call(name), count, keys), whole.shape[1:], count)
    with_new_keys = difference_of_patches(stages, module_call(name), keys, split, pack(whole), count)
    make_others(keys)
    return with_new_keys, difference_of_patches(stages, module_call(name), keys, split, pack(whole), count)


# With 64 tokens in 33 patches, most patches have two tokens and few have a token of text.
@pytest.mark.parametrize(("name", "count"), [("odd sides", 4), ("many tokens", 33)])
def test_patches_flow_through_its_stages(subject, name, count):
    _, (with_new_keys, with_other_keys) = run_ranks(patches, 2, subject[0], name, count)
    assert with_new_keys <= EXACT < 1e-3 < with_other_keys
