"""Calls of ComfyUI's own modules by several ranks give the answer of one process, for every family."""

import functools
from dataclasses import replace

import pytest
import torch

from comfy_modules import CASES, one_frame
from module_references import Reference, tensors_of
from parallel_backend.engine.attention.guides import Guides
from parallel_backend.engine.attention.sequence import SequenceAttention
from parallel_backend.engine.comm.groups import Layouts
from parallel_backend.engine.module_forward import make_module_forward
from parallel_backend.models.comfyui.tiny import cases
from parallel_backend.models.comfyui.tiny.cases import tiny_builder, tiny_inputs
from parallel_backend.models.comfyui.tiny.weights import random
from parallel_backend.models.tokens.table import sends_tokens, token_mode
from parallel_backend.requests import BLOCK, ROWS, STAY, Placement
from parallel_backend.strategy import ParallelStrategy
from ranks import run_ranks

EXACT = 1e-5  # relative to the largest value
# Rows, latent height and width: tokens that two ranks divide evenly, and tokens of two rows that they do not.
EVEN, ODD = (1, 8, 8), (2, 9, 7)
ULYSSES_2 = ParallelStrategy(ulysses_degree=2)
TOKENS = ULYSSES_2.replace(sends_tokens=True)
# Largest ratio of bytes sent with TOKENS to bytes without, also for answers, sound and text. Attention alone has 0.75.
LESS = 0.86
# Models with two streams, one stream, grouped keys, tokens in three dims, sound next to video, masks, timesteps per
# frame, sound inside blocks, a window, inseparable rows, values that blocks pass to later blocks.
SOME = [
    "flux1 + full mask",
    "qwen-image + text mask",
    "wan2.1 i2v",
    "krea2 + reference, gqa",
    "ltx-2 (video + sound)",
    "ltx, guides of strengths",
    "cosmos predict2",
    "wan2.2 s2v, silent",
    "humo",
    "ace-step 1.5",
    "hunyuan 3d 2.1",
    "triposplat",
]
OPTIONS = {"cond_or_uncond": [0, 1], "sigmas": torch.tensor([0.5])}
pytestmark = pytest.mark.usefixtures("comfyui_here")


@functools.cache
def _reference(name, size):
    return Reference(*CASES[name], size)


def _differences(world, strategies, calls):
    """Returns the difference for each strategy and each (reference, token mode)."""
    layouts = Layouts(world)
    return [
        reference.difference(make_module_forward(reference.model, layouts, Placement(strategy)), tokens)
        for strategy in strategies
        for reference, tokens in calls
    ]


def _worst(strategy, calls):
    found = run_ranks(_differences, strategy.world_size, [strategy], calls)
    return max(max(of_rank) for of_rank in found)


# Every family, in three shares: a start of ranks costs more than a family does.
SHARES = [list(CASES)[first::3] for first in range(3)]
ONE_OF_EACH = [next(iter(by_name)) for kind, by_name in cases.CASES.items() if kind != "UNetModel"]


@pytest.mark.parametrize("names", SHARES, ids=lambda names: names[0])
def test_ulysses_matches_one_process(names):
    """If ranks send tokens before projection, at once or in groups of heads, attention sends a quarter less. Answers
    are gathered as before."""
    references = [(name, _reference(name, ODD)) for name in names]
    plain, *of_tokens = map(Placement, (ULYSSES_2, TOKENS, TOKENS.replace(head_groups=2)))

    def answers(world):
        found = []
        for _, one in references:
            sending = of_tokens if sends_tokens(type(one.model.module).__name__) else []
            found.append([one.on_ranks(world, one.mode, plain, *sending), one.on_ranks(world, BLOCK, plain)])
        return found

    for found in run_ranks(answers, 2):
        for (name, one), (own_mode, between_blocks) in zip(references, found, strict=True):
            assert all(far <= EXACT for far, *_ in own_mode + between_blocks), name
            (_, sent, _), *with_tokens = own_mode
            for _, tokens, _ in with_tokens:
                assert (tokens < LESS * sent) == (one.mode == STAY), f"{name}: {tokens / sent:.2f}"
            for _, gathered, _ in between_blocks if one.mode == STAY else ():
                assert 0 < sent < gathered, name


def test_proven_call_shapes_let_tokens_stay():
    modes = {
        name: token_mode(kind, inputs(*EVEN)[1])
        for kind, by_name in cases.CASES.items()
        for name, (_, inputs) in by_name.items()
        if name in CASES
    }
    assert {name for name, mode in modes.items() if mode != STAY} == {
        "hidream",
        "chroma radiance",
        "pid",
        "wan2.2 animate, face",
        "wan2.2 s2v",
        "wan dancer",
    }


@pytest.mark.parametrize(
    "strategies",
    [
        [ParallelStrategy(ring_degree=2), ParallelStrategy(ulysses_degree=2, head_groups=2)],
        [ParallelStrategy(ulysses_degree=3, device_shares=(1.0, 3.0, 2.0), head_groups=4)],
        [ParallelStrategy(ring_degree=2, ulysses_degree=2)],
        [ParallelStrategy(cfg_degree=2, ulysses_degree=2)],
    ],
    ids=["ring, groups of heads", "uneven devices", "ulysses x ring", "cfg x ulysses"],
)
def test_other_layouts_of_the_sequence_axis(strategies):
    references = [
        Reference(*CASES[name], ODD, OPTIONS)
        for name in SOME
        if strategies[0].cfg_degree == 1 or "ltx" not in name
    ]
    calls = [*((one, STAY) for one in references), (references[0], BLOCK)]
    for found in run_ranks(_differences, strategies[0].world_size, strategies, calls):
        assert all(far <= EXACT for far in found)


@pytest.mark.parametrize("name", ["ltx, guides of strengths", "ltx-2, guides of strengths"])
def test_guides_of_other_strengths_show(name):
    """Proves that the tolerance is tight enough to show guides of strength 1, and the guides of other queries."""
    one = _reference(name, EVEN)
    plain = Reference(*CASES[name.replace("guides of strengths", "2 guides")], EVEN)
    pairs = list(zip(tensors_of(one.answer), tensors_of(plain.answer), strict=True))
    assert ((pairs[0][0] - pairs[0][1]).abs().max() / pairs[0][1].abs().max()).item() > 100 * EXACT

    def moved(world):
        of_queries = Guides.of_queries
        Guides.of_queries = lambda self, first, count: of_queries(self, first + 1, count)
        return _differences(world, [ULYSSES_2], [(one, STAY)])

    assert min(run_ranks(moved, 2)[0]) > 10 * EXACT


# Layouts of which some ranks have no token of one of the streams.
FEW = [
    ParallelStrategy(ring_degree=2, ulysses_degree=2, device_shares=(1.0, 3.0, 2.0, 1.0)),
    ParallelStrategy(cfg_degree=2, ulysses_degree=2),
    ParallelStrategy(cfg_degree=2, ring_degree=2),
    ParallelStrategy(ulysses_degree=4),
    ParallelStrategy(ring_degree=4),
]


def test_fewer_tokens_than_ranks():
    """An empty negative prompt has a few tokens, and the image of a preview may have as few. Ranks without tokens still
    join the other ranks' communicators."""
    build, inputs = CASES["qwen-image + text mask"]

    def two_words(*size):
        args, kwargs = inputs(*size)
        return args, kwargs | {name: kwargs[name][:, :2] for name in ("context", "attention_mask")}

    def one_word(*size):
        args, kwargs = tiny_inputs("flux + controlnet")(*size)
        return args, kwargs | {"context": kwargs["context"][:, :1]}

    references = [
        Reference(tiny_builder("wan"), one_frame, (2, 2, 4)),
        Reference(build, two_words, ODD),
        Reference(tiny_builder("flux"), one_word, ODD),
        Reference(tiny_builder("flux"), one_word, (2, 2, 2)),
    ]
    calls = [(one, tokens) for one in references for tokens in (STAY, BLOCK)]
    for found in run_ranks(_differences, 4, FEW, calls):
        assert all(far <= EXACT for far in found)


def test_without_the_exchange_the_answer_is_another():
    """Proves that the tolerance is tight enough to show attention over the local tokens only."""
    calls = [(_reference(name, EVEN), BLOCK) for name in ONE_OF_EACH]

    def own(self, library, call, streams):
        k, v = (t.repeat_interleave(call.heads // t.shape[1], 1) for t in (call.k, call.v))
        return library(replace(call, k=k, v=v, mask=None))

    def apart(world):
        SequenceAttention._attend = own
        return _differences(world, [ULYSSES_2], calls)

    assert min(run_ranks(apart, 2)[0]) > 100 * EXACT


def test_a_reference_at_timestep_zero_needs_whole_tokens_between_blocks():
    build, inputs = CASES["flux2 + reference"]

    def at_zero(*size):
        args, kwargs = inputs(*size)
        return args, kwargs | {"ref_latents_method": "index_timestep_zero"}

    one = Reference(build, at_zero, EVEN)
    assert one.mode == BLOCK
    assert _worst(ULYSSES_2, [(one, BLOCK)]) <= EXACT
    assert _worst(ULYSSES_2, [(one, STAY)]) > 100 * EXACT


def _mean_added(args, extra):
    """Adds the mean of all tokens: a patch that reads all tokens, like those for style and identity."""
    out = extra["original_block"](args)
    out["img"] = out["img"] + out["img"].mean(dim=1, keepdim=True)
    return out


def _skipped(args, extra):
    return args


def _mirrored(args):
    """Mixes tokens in mirrored order into the image: a model patch after each block, like some ControlNets."""
    return args | {"img": args["img"] * 0.9 + 0.1 * args["img"].flip(1)}


def _replaced(patch, *blocks):
    return {"patches_replace": {"dit": dict.fromkeys(blocks, patch)}}


def test_what_lies_between_blocks_sees_whole_tokens():
    """The changes: skipped blocks, a look at all tokens, a patch after each block, and an argument that adds tokens."""
    changed = [
        ("flux1", _replaced(_skipped, ("double_block", 1), ("single_block", 0))),
        ("flux1", _replaced(_mean_added, ("double_block", 1))),
        ("qwen-image", {"patches": {"double_block": [_mirrored]}}),
        ("wan2.1 t2v", _replaced(_mean_added, ("double_block", 2))),
    ]
    build, inputs = CASES["hunyuanvideo + mask"]

    def with_reference(b, h, w):
        args, kwargs = inputs(b, h, w)
        return args, kwargs | {"ref_latent": random(b, 16, 1, h, w, seed=4)}

    references = [Reference(*CASES[name], ODD, options) for name, options in changed]
    references.append(Reference(build, with_reference, (1, 10, 6)))
    assert {one.mode for one in references} == {BLOCK}
    assert _worst(ULYSSES_2, [(one, BLOCK) for one in references]) <= EXACT


def test_rows_of_every_family_over_two_ranks():
    """The calls have three rows, so that one rank has two."""
    options = {"cond_or_uncond": [0, 1, 1], "sigmas": torch.ones(1), "sample_sigmas": torch.ones(3)}
    # LTX-2: see the next test; MiniMax-H3 has one row.
    cases = [case for name, case in CASES.items() if not name.startswith(("ltx-2", "minimax"))]
    references = [Reference(*case, (3, 4, 4), options) for case in cases]
    references.append(Reference(tiny_builder("sdxl"), tiny_inputs("sdxl + controlnet"), (3, 8, 8), options))
    assert _worst(ParallelStrategy(data_degree=2), [(one, ROWS) for one in references]) <= EXACT


def test_rows_of_sound_and_video_at_one_timestep():
    """LTX-2 takes the maximum of all rows' timesteps, which are equal in samplers."""

    def same_time(b, h, w):
        ((latents, times), kwargs) = tiny_inputs("ltx-2")(b, h, w)
        return (latents, tuple(t[:1].repeat(b, *[1] * (t.ndim - 1)) for t in times)), kwargs

    one = Reference(tiny_builder("ltx-2"), same_time, ODD)
    assert _worst(ParallelStrategy(cfg_degree=2), [(one, ROWS), (one, BLOCK)]) <= EXACT


def test_tokens_that_cannot_be_shared_out_leave_rows_to_all_ranks():
    one = Reference(tiny_builder("sdxl"), tiny_inputs("sdxl + controlnet"), (2, 8, 8))

    def rows_of_each_rank(world):
        seen = []
        first = one.model.module.input_blocks[0][0]
        first.register_forward_pre_hook(lambda module, args: seen.append(len(args[0])))
        return [_differences(world, [ULYSSES_2], [(one, ROWS)])[0], *seen]

    for difference, *seen in run_ranks(rows_of_each_rank, 2):
        assert difference <= EXACT
        assert seen == [1]


def test_a_call_leaves_nothing_behind():
    """This includes a call that raises in the middle of the model."""
    one = _reference("flux1", EVEN)

    def left(world):
        forward = make_module_forward(one.model, Layouts(world), Placement(ULYSSES_2))
        module, found = one.model.module, []
        one.difference(forward, STAY)
        found.append(_changes(module))
        failing = module.single_blocks[1].register_forward_pre_hook(_fail)
        with pytest.raises(ZeroDivisionError):
            one.difference(forward, STAY)
        failing.remove()
        found.append(_changes(module))
        return [*found, one.difference(forward, BLOCK)]

    for after_a_call, after_a_failure, difference in run_ranks(left, 2):
        assert (after_a_call, after_a_failure) == (0, 0)
        assert difference <= EXACT


def _fail(*_):
    raise ZeroDivisionError


def _changes(module):
    return sum("forward" in part.__dict__ or bool(part._forward_pre_hooks) for part in module.modules())
