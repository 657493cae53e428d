"""Two ranks that exchange tokens before projection, and the cases in which they exchange queries, keys and values."""

from functools import partial

import pytest

from comfy_modules import CASES
from module_references import Reference
from parallel_backend.engine.comm.groups import Layouts
from parallel_backend.engine.module_forward import make_module_forward
from parallel_backend.engine.sharding import ByteSharding
from parallel_backend.models.comfyui.placing import blocks_of
from parallel_backend.options import ComputeOptions
from parallel_backend.requests import STAY, Placement
from parallel_backend.strategy import ParallelStrategy
from ranks import run_ranks
from tests.closed_forms.traffic import share_of_tokens_sent

EXACT = 1e-5  # relative to the largest value
SIZE = (1, 8, 8)
ULYSSES = ParallelStrategy(ulysses_degree=2)
TOKENS = ULYSSES.replace(sends_tokens=True)
pytestmark = pytest.mark.usefixtures("comfyui_here")


def _runs(world, change):
    """Returns (difference, bytes sent) without and with tokens sent, for a tiny Wan with changed attentions."""
    one, layouts, found = Reference(*CASES["wan2.1 t2v"], SIZE), Layouts(world), []
    for block in one.model.module.blocks:
        change(block.self_attn)
    for strategy in (ULYSSES, TOKENS):
        forward = make_module_forward(one.model, layouts, Placement(strategy))
        found.append(one.difference_and_bytes(forward, STAY))
    return found


CHANGES = {  # of one of Wan's attentions
    "a hook": lambda attention: attention.k.register_forward_hook(lambda *_: None),
    "another forward": lambda attention: setattr(
        attention.q, "forward", partial(type(attention.q).forward, attention.q)
    ),
    "a patched weight": lambda attention: setattr(attention.v, "weight_function", [lambda weight: weight]),
    "a patched norm": lambda attention: setattr(attention.norm_q, "weight_function", [lambda weight: weight]),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_layer_that_something_was_put_around_is_exchanged_as_it_was(change):
    for (first, plain), (second, sent) in run_ranks(_runs, 2, CHANGES[change]):
        assert max(first, second) <= EXACT
        assert sent == plain > 0


def _sent(world, names):
    layouts, found = Layouts(world), []
    for name in names:
        one = Reference(*CASES[name], SIZE)
        forwards = [make_module_forward(one.model, layouts, Placement(s)) for s in (ULYSSES, TOKENS)]
        plain, tokens = (one.difference_and_bytes(forward, STAY)[1] for forward in forwards)
        found.append(tokens / plain)
    return found


def test_as_much_is_saved_as_the_closed_form_says():
    """The models have one stream, whose tokens divide evenly. Wan has norms over all heads, and Ideogram has none."""
    names = ["wan2.1 t2v", "ideogram 4, no text"]
    wan, ideogram = (CASES[name][0]() for name in names)
    width = ideogram.layers[0].attention.hidden_size
    expected = [
        share_of_tokens_sent(wan.dim, wan.dim, len(wan.blocks), norms=2),
        share_of_tokens_sent(width, width, len(ideogram.layers)),
    ]
    for found in run_ranks(_sent, 2, names):
        assert found == pytest.approx(expected, rel=1e-9)


def _rotated_by_something_else(world, shards):
    """Runs blocks that rotate by a tensor that they make themselves, as another version of ComfyUI might."""
    one, layouts = Reference(*CASES["wan2.1 t2v"], SIZE), Layouts(world)
    strategy, model = TOKENS.replace(shard_weights=shards), one.model
    if shards:
        model.byte_sharding = ByteSharding(layouts.get(strategy).shard, model.device, offload=False)
        model.byte_sharding.shard(model.module, list(blocks_of(model.module)), {})
    for block in one.model.module.blocks:
        attention = block.self_attn
        attention.forward = lambda x, freqs, _own=attention, **rest: type(_own).forward(
            _own, x, freqs.clone(), **rest
        )
    forward = make_module_forward(model, layouts, Placement(strategy))
    differences = [one.difference(forward, STAY) for _ in range(2)]
    return differences, forward.notes, "forward" in model.module.blocks[0].self_attn.q.__dict__


@pytest.mark.parametrize("shards", [False, True], ids=["whole weights", "weights shared out"])
def test_a_block_that_rotates_otherwise_exchanges_as_it_was_and_it_is_said(shards):
    for differences, (note,), changed in run_ranks(_rotated_by_something_else, 2, shards):
        assert max(differences) <= EXACT
        assert "by another argument" in note
        assert not changed


def _rounded(world):
    one, layouts, found = Reference(*CASES["flux1"], SIZE), Layouts(world), []
    for exchange_dtype in ("same", "fp8"):
        options = ComputeOptions(exchange_dtype=exchange_dtype)
        forward = make_module_forward(one.model, layouts, Placement(TOKENS, "native", options))
        found.append(one.difference_and_bytes(forward, STAY))
    return found


def test_tokens_are_rounded_on_their_way_where_that_was_wished():
    for (exact, sent), (rounded, less) in run_ranks(_rounded, 2):
        assert exact <= EXACT < rounded < 0.05
        assert less < 0.6 * sent
