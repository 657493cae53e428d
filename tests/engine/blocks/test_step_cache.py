"""The step cache with ComfyUI's own modules, on one and on several ranks, against a second computation by hooks."""

from __future__ import annotations

import copy
import functools
from contextlib import ExitStack

import pytest
import torch
import torch.distributed as dist

from comfy_modules import CASES
from comfy_weight_files import inputs, spec, write
from module_references import tensors_of, tiny_model
from parallel_backend.engine.blocks.step_cache import ModuleCache, ReuseVote
from parallel_backend.engine.comm.groups import Layouts
from parallel_backend.engine.load import load_under
from parallel_backend.engine.module_forward import make_module_forward
from parallel_backend.models.comfyui.tiny.weights import random
from parallel_backend.models.tokens.cached_outputs import why_not_reused
from parallel_backend.requests import (
    ATTENTION,
    BLOCK,
    ROWS,
    STAY,
    ModelSpec,
    ModuleCall,
    Placement,
)
from parallel_backend.strategy import ParallelStrategy
from ranks import run_ranks

EXACT = 1e-5  # relative to the largest value
THRESHOLD = 0.05
# Distance of each step's latent from the first step's. Each step has a call for each of two prompts.
STEPS = (0.0, 0.01, 1.0, 1.01)
REUSED = (False, True, False, True)
COUNTS = [2 * len(STEPS), 2 * sum(REUSED)]  # network calls, and those that reused
ULYSSES_2 = ParallelStrategy(ulysses_degree=2)
ODD = (2, 9, 7)
# For each model: the first block; the number of the image among its outputs; the module that takes the image after the
# blocks, or None if the last block gives it; the last block if it gives a second output, which is also cached.
WAYS = {
    "flux1 + controlnet": ("double_blocks.0", 0, "final_layer", None),
    "hunyuanvideo + mask": ("double_blocks.0", 0, "final_layer", None),
    "qwen-image + text mask": ("transformer_blocks.0", 1, "norm_out", None),
    "wan2.1 i2v": ("blocks.0", 0, "head", None),
    "wan2.1 vace": ("blocks.0", 0, "head", None),
    "z-image": ("layers.0", 0, "final_layer", None),
    "sd3.5 medium": ("joint_blocks.0", 1, "final_layer", None),
    "ltx, 2 guides": ("transformer_blocks.0", 0, "norm_out", None),
    "ltx-2 (video + sound)": ("transformer_blocks.0", 0, "norm_out", "transformer_blocks.-1"),
    "cosmos predict2": ("blocks.0", 0, "final_layer", None),
    "kandinsky5": ("visual_transformer_blocks.0", 0, None, None),
}
pytestmark = pytest.mark.usefixtures("comfyui_here")


def _calls(name, options=None):
    """Returns (number of the prompt, args, kwargs) for each call of a job, in order. `options`: transformer_options."""
    (latents, times), kwargs = CASES[name][1](*ODD)
    several = isinstance(latents, (list, tuple))
    parts = list(latents) if several else [latents]
    if "ltx-2" in name:  # it takes the maximum of all rows' timesteps, which are equal in samplers
        times = tuple(t[:1].repeat(ODD[0], *[1] * (t.ndim - 1)) for t in times)
    generator = torch.Generator().manual_seed(5)
    moves = [torch.randn(part.shape, generator=generator) for part in parts]
    found = []
    for far in STEPS:
        moved = [part + far * move for part, move in zip(parts, moves, strict=True)]
        for prompt in range(2):
            context = kwargs["context"] * (1.0 + prompt)
            given = kwargs | {"context": context, "transformer_options": options or {}}
            found.append((prompt, (moved if several else moved[0], times), given))
    return found


@torch.inference_mode()
def _answers(forward, name, cache, tokens, options=None):
    """Returns the answers to all calls, as lists of tensors."""
    found = []
    for prompt, args, kwargs in _calls(name, options):
        args, kwargs = copy.deepcopy((args, kwargs))
        call = ModuleCall(args, kwargs, ODD[0], tokens, prompts=(prompt,))
        found.append(tensors_of(forward(call, cache)))
    return found


def _submodule(module, path):
    *above, last = path.split(".")
    return module.get_submodule(".".join(above))[int(last)]


@torch.inference_mode()
def _by_hooks(name, options=None):
    """Returns the answers of the plain module, with all its blocks, to the same calls. In calls that reuse, hooks
    replace the blocks' output by the first block's output plus what the others added in the last computed call."""
    first_path, place, leave_path, last_path = WAYS[name]
    module = tiny_model(CASES[name][0]).module
    first = _submodule(module, first_path)
    blocks = module.get_submodule(first_path.rpartition(".")[0])
    state, kept = {}, {}

    def begun(_, __, out):
        outs = out if isinstance(out, tuple) else (out,)
        state["image"] = outs[place].clone()
        state["beside"] = outs[1].clone() if last_path else None

    def at_end(what, value):
        key = (state["prompt"], what)
        if state["reuses"]:
            return state[what] + kept[key]
        kept[key] = value - state[what]
        return value

    def leaving(_, args):
        return (at_end("image", args[0]), *args[1:])

    def last(_, __, out):
        if last_path:
            return out[0], at_end("beside", out[1])
        return at_end("image", out)

    with ExitStack() as hooks:
        hooks.callback(first.register_forward_hook(begun).remove)
        if leave_path:
            hooks.callback(module.get_submodule(leave_path).register_forward_pre_hook(leaving).remove)
        if last_path or not leave_path:
            hooks.callback(blocks[-1].register_forward_hook(last).remove)
        found = []
        for number, (prompt, args, kwargs) in enumerate(_calls(name, options)):
            state |= {"prompt": prompt, "reuses": REUSED[number // 2]}
            args, kwargs = copy.deepcopy((args, kwargs))
            found.append(tensors_of(module(*args, **kwargs)))
    return found


def _difference(found, expected):
    """Returns the largest difference, relative to the largest value of each answer."""
    return max(
        ((one - other).abs().max() / other.abs().max()).item()
        for answers in zip(found, expected, strict=True)
        for one, other in zip(*answers, strict=True)
    )


def _job(world, strategy, calls, options=None):
    """Returns for each (name, token mode): (answers, network calls, reused calls)."""
    layouts, found = Layouts(world), []
    for name, tokens in calls:
        cache = ModuleCache(THRESHOLD)
        forward = make_module_forward(tiny_model(CASES[name][0]), layouts, Placement(strategy))
        found.append((_answers(forward, name, cache, tokens, options), cache.calls, cache.reused))
    return found


@functools.cache
def _expected(name):
    return _by_hooks(name)


@pytest.mark.xdist_group("step_cache")
@pytest.mark.parametrize("name", WAYS)
@torch.inference_mode()
def test_one_rank_gives_what_blocks_left_out_would_have_added_before(name):
    """The tolerance tells reused calls from computed ones."""
    answers, *counts = run_ranks(_job, 1, ParallelStrategy(), [(name, STAY)])[0][0]
    assert counts == COUNTS
    assert _difference(answers, _expected(name)) <= EXACT
    for number, (_, args, kwargs) in enumerate(_calls(name)):
        exact = tensors_of(tiny_model(CASES[name][0]).module(*args, **kwargs))
        difference = _difference([answers[number]], [exact])
        assert (difference > 10 * EXACT) if REUSED[number // 2] else (difference <= EXACT)


def _between_blocks(args):
    """Changes the image after each block by an amount that depends on its number: a patch like a ControlNet's."""
    args["img"] = args["img"] + 0.05 * (1 + args["block_index"]) * args["img"].tanh()
    return args


CHANGED = "qwen-image + text mask"
PATCHED = {"patches": {"double_block": [_between_blocks]}}
LAYER = {("double_block", 1): lambda args, extra: args}


def _one_and_two_ranks(modes, options):
    """Yields (answers, network calls, reused calls) of one rank, then of two Ulysses ranks for each of `modes`."""
    yield run_ranks(_job, 1, ParallelStrategy(), [(CHANGED, STAY)], options)[0][0]
    jobs = [(CHANGED, tokens) for tokens in modes]
    for of_rank in run_ranks(_job, 2, ULYSSES_2, jobs, options):
        yield from of_rank


@pytest.mark.parametrize("options", [PATCHED, PATCHED | {"patches_replace": {"dit": LAYER}}])
def test_a_model_that_nodes_have_changed_reuses_what_all_changes_added(options):
    expected = _by_hooks(CHANGED, options)
    assert _difference(expected, _expected(CHANGED)) > 10 * EXACT
    for answers, *counts in _one_and_two_ranks((BLOCK, ATTENTION), options):
        assert counts == COUNTS
        assert _difference(answers, expected) <= EXACT


@torch.inference_mode()
def test_without_its_first_block_nothing_is_left_out():
    options = {"patches_replace": {"dit": {("double_block", 0): lambda args, extra: args}}}
    module = tiny_model(CASES[CHANGED][0]).module
    expected = [
        tensors_of(module(*args, **copy.deepcopy(kwargs))) for _, args, kwargs in _calls(CHANGED, options)
    ]
    for answers, _, reused in _one_and_two_ranks((BLOCK,), options):
        assert reused == 0
        assert _difference(answers, expected) <= EXACT


def _by_both_providers(world, path):
    """Returns for ComfyUI's Flux.1 and for diffusers', each with a step cache: (answers to similar calls, reused calls,
    ratios that the cache compared)."""
    layouts, largest, found = Layouts(world), ReuseVote.largest, []
    (first, times), given = inputs(rows=2)
    kwargs = {name: given[name] for name in ("context", "y", "guidance")}  # what diffusers' takes
    for each in (spec(path), ModelSpec(path)):
        forward = make_module_forward(load_under(each, layouts, ULYSSES_2), layouts, Placement(ULYSSES_2))
        cache, ratios, answers = ModuleCache(THRESHOLD), [], []
        ReuseVote.largest = lambda *args, ratios=ratios: ratios.append(largest(*args)) or ratios[-1]
        with torch.inference_mode():
            for far in (0.0, 0.05, 0.1, 0.4, 0.42, 0.44):
                x = first + far * random(*first.shape, seed=9)
                answers.append(forward(ModuleCall((x, times), dict(kwargs), 2, STAY), cache))
        found.append((answers, cache.reused, ratios))
    return found


def test_comfyuis_flux_and_diffusers_flux_skip_the_same_calls_alike(tmp_path):
    path = str(write(tmp_path / "flux.safetensors", "fp32"))
    for ours, theirs in run_ranks(_by_both_providers, 2, path):
        (answers, reused, ratios), (others, reused_there, ratios_there) = ours, theirs
        assert 0 < reused == reused_there < len(answers) - 1
        assert ratios[1:] == pytest.approx(ratios_there[1:], rel=1e-4)
        pairs = zip(answers, others, strict=True)
        assert max(_difference([[one]], [[other]]) for one, other in pairs) <= EXACT


STRATEGIES = {
    "ulysses": (ParallelStrategy(ulysses_degree=2), (STAY, BLOCK), tuple(WAYS)),
    "ring": (ParallelStrategy(ring_degree=2), (STAY,), ("wan2.1 i2v",)),
    # A rank computes its rows as one process does: two outputs, and an image that the last block gives.
    "rows": (ParallelStrategy(cfg_degree=2), (STAY,), ("ltx-2 (video + sound)", "kandinsky5")),
    "a rank without rows": (ParallelStrategy(data_degree=3), (STAY,), ("qwen-image + text mask",)),
    "rows and tokens": (
        ParallelStrategy(cfg_degree=2, ulysses_degree=2),
        (STAY,),
        ("flux1 + controlnet",),
    ),
}


@pytest.mark.xdist_group("step_cache")
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_several_ranks_give_what_one_gives_and_reuse_the_same_calls(strategy):
    split, modes, names = STRATEGIES[strategy]
    jobs = [(name, tokens) for name in names for tokens in modes]
    for of_rank in run_ranks(_job, split.world_size, split, jobs):
        for job, (answers, *counts) in zip(jobs, of_rank, strict=True):
            assert counts == COUNTS, job
            assert _difference(answers, _expected(job[0])) <= EXACT, job


def _near_the_threshold(world, name):
    """Sets a threshold between the ratios that both ranks see alone. Returns (True if this rank alone would reuse the
    second call, reused calls, answers)."""
    seen, largest = [], ReuseVote.largest

    def noted(meeting, change, before):
        seen.append((change / before).max().item())
        return largest(meeting, change, before)

    ReuseVote.largest = noted
    forward = make_module_forward(tiny_model(CASES[name][0]), Layouts(world), Placement(ULYSSES_2))
    _answers(forward, name, ModuleCache(0.0), STAY)
    own = [torch.zeros(1, dtype=torch.float64) for _ in range(2)]
    dist.all_gather(own, torch.tensor([seen[2]], dtype=torch.float64))
    between = ModuleCache(torch.cat(own).mean().item())
    answers = _answers(forward, name, between, STAY)
    return seen[2] < between.threshold, between.reused, answers


def test_ranks_that_would_decide_apart_decide_together():
    (one, reused, answers), (other, reused_there, answers_there) = run_ranks(
        _near_the_threshold, 2, "z-image"
    )
    assert one != other  # alone they would decide differently, and hang
    assert reused == reused_there
    assert _difference(answers, answers_there) == 0


def _around_a_job(world, name):
    """Returns (answers without a cache, with one that never reuses, and without again; reused calls)."""
    forward = make_module_forward(tiny_model(CASES[name][0]), Layouts(world), Placement(ULYSSES_2))
    never = ModuleCache(0.0)
    return [_answers(forward, name, cache, STAY) for cache in (None, never, None)], never.reused


def test_a_threshold_of_zero_is_exact_to_the_bit_and_nothing_outlives_a_job():
    for (plain, never, after), reused in run_ranks(_around_a_job, 2, "wan2.1 vace"):
        assert not reused
        assert _difference(never, plain) == _difference(after, plain) == 0


def _failed_and_other_sizes(world, name):
    """Returns the reused calls so far after each call: before and after a failed call, and with another size."""
    forward = make_module_forward(tiny_model(CASES[name][0]), Layouts(world), Placement(ULYSSES_2))
    cache, found = ModuleCache(float("inf")), []
    _, args, kwargs = _calls(name)[0]

    @torch.inference_mode()
    def call(*args, rows):
        forward(ModuleCall(*copy.deepcopy((args, kwargs)), rows, STAY, prompts=(0,)), cache)
        found.append(cache.reused)

    call(*args, rows=2)
    call(*args, rows=2)
    failing = forward.model.module.blocks[2].register_forward_pre_hook(_fail)
    with pytest.raises(ZeroDivisionError):
        call(*args, rows=2)
    failing.remove()
    call(*args, rows=2)
    bigger = random(2, *args[0].shape[1:3], 12, 8)
    call(bigger, args[1], rows=2)
    call(bigger, args[1], rows=2)
    return found


def _fail(*_):
    raise ZeroDivisionError


def test_what_was_kept_counts_for_the_same_shapes_only():
    assert run_ranks(_failed_and_other_sizes, 2, "wan2.1 t2v") == [[0, 1, 1, 1, 2]] * 2


@pytest.mark.parametrize("name", ["hidream", "chroma radiance", "boogu"])
def test_classes_that_cannot_leave_blocks_out_compute_all_and_say_so(name):
    model = tiny_model(CASES[name][0])
    with torch.inference_mode():
        args, kwargs = CASES[name][1](1, 8, 8)
        call = ModuleCall(args, kwargs | {"transformer_options": {}}, 1, BLOCK, prompts=(0,))

        def reused(world):
            cache = ModuleCache(float("inf"))
            forward = make_module_forward(model, Layouts(world), Placement())
            for _ in range(2):
                forward(copy.deepcopy(call), cache)
            return cache.reused

        assert run_ranks(reused, 1) == [0]
    assert "does not know what" in why_not_reused(type(model.module).__name__, STAY)


def test_the_reason_is_known_before_a_job():
    assert why_not_reused("WanModel", STAY) == ""
    for mode in (BLOCK, ROWS):
        assert "computes in another way" in why_not_reused("WanModel", mode)
    assert "is not described" in why_not_reused("UNetModel", STAY)
