"""diffusers' Flux under the one engine: every strategy gives what ComfyUI's own module gives in one process."""

import copy

import pytest
import torch

from adapted_flux import CALLS, SIZES, WIDTH, adapted, comfyui_flux
from comfy_modules import import_comfyui_here
from parallel_backend.engine.comm.groups import Layouts
from parallel_backend.engine.module_forward import make_module_forward
from parallel_backend.engine.sharding import ByteSharding
from parallel_backend.engine.stages.owners import pack
from parallel_backend.engine.stages.stale_keys import KeptKeys
from parallel_backend.engine.tensor_parallel import slices_of
from parallel_backend.engine.tokens.block_tokens import Patch
from parallel_backend.models.base import ModelPart
from parallel_backend.models.tokens.table import token_mode
from parallel_backend.requests import BLOCK, STAY, ModuleCall, Placement
from parallel_backend.sampling.image_patches import ElementPatches
from parallel_backend.strategy import ParallelStrategy
from ranks import run_ranks
from tests.closed_forms.traffic import expected_bytes

EXACT = 1e-5  # of the largest value
PATCHES = 4
EXACT_STRATEGIES = [
    ParallelStrategy(ulysses_degree=2),
    ParallelStrategy(ulysses_degree=2, sends_tokens=True),
    ParallelStrategy(ulysses_degree=2, sends_tokens=True, head_groups=2, device_shares=(2.0, 1.0)),
    ParallelStrategy(ring_degree=2, ulysses_degree=2, sends_tokens=True),
    ParallelStrategy(ulysses_degree=2, shard_weights=True, sends_tokens=True),
    ParallelStrategy(ring_degree=2),
    ParallelStrategy(cfg_degree=2),
    ParallelStrategy(data_degree=2),
    ParallelStrategy(ulysses_degree=3),
    ParallelStrategy(ring_degree=2, ulysses_degree=2),
    ParallelStrategy(cfg_degree=2, ulysses_degree=2),
    ParallelStrategy(pipefusion_degree=2),
    ParallelStrategy(pipefusion_degree=2, device_shares=(1.0, 3.0)),
    ParallelStrategy(ulysses_degree=2, shard_weights=True),
    ParallelStrategy(tensor_degree=2),
]
ALL_CALLS = EXACT_STRATEGIES[:2]
SOME_CALLS = ["odd sides", "three texts of one token", "everything"]
SPLITS_NO_ROWS_OR_LAYERS = [s for s in EXACT_STRATEGIES if s.row_degree == 1 and s.tensor_degree == 1]


@pytest.fixture(scope="module")
def subject(tmp_path_factory):
    """(path of the weights, {call: the answer of ComfyUI's module})"""
    import_comfyui_here()
    path = tmp_path_factory.mktemp("adapted") / "flux.safetensors"
    adapted(path)
    theirs = comfyui_flux(path)
    with torch.inference_mode():
        return str(path), {name: theirs(*made()[0], **made()[1]) for name, made in CALLS.items()}


def loaded(path, layouts, strategy):
    layout = layouts.get(strategy)
    shares = layout.stage_shares if strategy.pipefusion_degree > 1 else (1.0,)
    sharding = None
    if strategy.shard_weights:
        sharding = ByteSharding(layout.shard, layouts.world.device, layouts.traffic, offload=False)
    part = ModelPart(layout.pipe.index, shares, slices_of(layout.tensor, layouts), byte_sharding=sharding)
    return adapted(path, part, written=True)


def module_call(name, tokens=None):
    args, kwargs = CALLS[name]()
    return ModuleCall(args, kwargs, len(args[0]), tokens or token_mode("DiffusersFlux", kwargs))


@torch.inference_mode()
def answers(world, path, strategy, names, modes):
    """{call, tokens: (answer, bytes sent)} of one rank."""
    layouts = Layouts(world)
    model = loaded(path, layouts, strategy)
    forward, found = make_module_forward(model, layouts, Placement(strategy)), {}
    for name in names:
        for mode in modes:
            before = forward.bytes_sent
            found[name, mode] = (forward(module_call(name, mode)).clone(), forward.bytes_sent - before)
    return found


@pytest.mark.parametrize("strategy", EXACT_STRATEGIES, ids=lambda s: s.describe())
def test_every_strategy_gives_the_answer_of_comfyuis_module(subject, strategy):
    path, expected = subject
    modes = (STAY, BLOCK) if strategy in SPLITS_NO_ROWS_OR_LAYERS else (STAY,)
    names = CALLS if strategy in ALL_CALLS else SOME_CALLS
    for rank, found in enumerate(run_ranks(answers, strategy.world_size, path, strategy, names, modes)):
        for (name, mode), (answer, sent) in found.items():
            far = (answer - expected[name]).abs().max() / expected[name].abs().max()
            assert far <= EXACT, f"rank {rank}, {name}, tokens {mode}: {far:.1e}"
            if (name, mode) == ("odd sides", STAY) and has_closed_form(strategy):
                assert sent == closed_form(strategy, rank, name), f"rank {rank}"


def has_closed_form(strategy):
    """True if all that is sent are the tokens of attention and answers, with heads that divide."""
    divides = SIZES["heads"] % strategy.ulysses_degree == 0
    even = not strategy.device_shares
    return (
        divides and even and strategy.pipefusion_degree == strategy.tensor_degree == 1 and not strategy.shards
    )


def closed_form(strategy, rank, name):
    args, kwargs = CALLS[name]()
    rows, _, height, width = args[0].shape
    return expected_bytes(
        strategy,
        rank,
        rows=rows,
        text=kwargs["context"].shape[1],
        image=-(-height // 2) * -(-width // 2),
        layers=SIZES["double_blocks"] + SIZES["single_blocks"],
        apart=SIZES["double_blocks"],
        hidden=WIDTH,
        latent_elements=16 * height * width,
        patch_channels=WIDTH,  # tokens are gathered before the last layer
    )


@torch.inference_mode()
def patches(world, path):
    """How far patches are that find keys of the same call, and keys of another."""
    strategy, layouts = ParallelStrategy(pipefusion_degree=2), Layouts(world)
    forward, keys = (
        make_module_forward(loaded(path, layouts, strategy), layouts, Placement(strategy)),
        KeptKeys(),
    )
    whole, stages = forward(module_call("odd sides"), keys=keys), forward.stages
    assert not stages.why_whole(module_call("odd sides"), keys)
    owners = stages.owners(module_call("odd sides"), PATCHES, keys)
    split, found = ElementPatches(owners, whole.shape[1:], PATCHES), []
    for poison in (0.0, 1.0):
        for held in keys._held.values():
            for tensor in held:
                tensor += poison
        far = [0.0]
        for number in range(PATCHES):
            one = stages.patch(copy.deepcopy(module_call("odd sides")), Patch(number, PATCHES), keys)
            if one is not None:
                difference = split.take(one, number) - split.take(pack(whole), number)
                far.append((difference.abs().max() / whole.abs().max()).item())
        stages.settle()
        found.append(max(far))
    return found


def test_patches_flow_through_its_stages(subject):
    _, (with_new_keys, with_other_keys) = run_ranks(patches, 2, subject[0])
    assert with_new_keys <= EXACT < 1e-3 < with_other_keys
