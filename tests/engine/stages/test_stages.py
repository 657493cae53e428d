"""PipeFusion's stages of ComfyUI's modules: whole images, and patches with keys of the same call, equal one process."""

from __future__ import annotations

import copy
import functools
from dataclasses import replace

import pytest
import torch

from module_references import alone, difference_of_patches, make_others, relative, tiny_model
from parallel_backend.engine.comm.groups import Layouts
from parallel_backend.engine.module_forward import make_module_forward
from parallel_backend.engine.stages.owners import pack
from parallel_backend.engine.stages.p2p import P2PChannel
from parallel_backend.engine.stages.stale_keys import StaleKeyCache
from parallel_backend.models.comfyui.tiny.cases import CASES, tiny_builder, tiny_inputs
from parallel_backend.models.tokens.table import TABLE, has_stages, token_mode
from parallel_backend.options import ROUNDED, SAME, ComputeOptions
from parallel_backend.requests import ModuleCall, Placement
from parallel_backend.sampling.image_patches import ElementPatches
from parallel_backend.strategy import ParallelStrategy
from ranks import run_ranks

EXACT = 1e-5  # relative to the largest value
ROWS, SIZE, PATCHES = 2, (9, 7), 3  # tokens that do not divide evenly into patches
STAGED = [name for name in TABLE if has_stages(name)]
TWO_LISTS = {name for name in STAGED if len(TABLE[name].regions[-1].lists) == 2}
TWO_LISTS -= {"Chroma", "Hunyuan3Dv2"}  # of the same kinds of blocks as Flux
TWO = ParallelStrategy(pipefusion_degree=2)
# Two ranks per stage, with equal and with unequal shares.
ULYSSES, RING = TWO.replace(ulysses_degree=2), TWO.replace(ring_degree=2)
IN_STAGES = (ULYSSES, RING.replace(device_shares=(2.0, 1.0, 2.0, 1.0)))
# The second stage begins inside the first list of blocks (EARLY) or inside the second (LATE).
EARLY, LATE = (TWO.replace(device_shares=shares) for shares in ((1.0, 3.0), (3.0, 1.0)))
# Calls that stages compute in whole images only: attention has a mask, a ControlNet adds to tokens, or the model looks
# at tokens between its blocks.
WHOLE = {
    "flux1 + controlnet",
    "flux1 + full mask",
    "flux2 + reference at t=0",
    "hunyuanvideo + mask",
    "ideogram 4 + text mask",
    "ltx, guides of strengths",
    "ltx-2, guides of strengths",
    "mage-flow + reference, text mask",
    "qwen-image + text mask",
    "wan dancer",
    "wan2.2 animate, face",
    "wan2.2 s2v",
}
TEXT_FIRST = {  # before the image in one sequence
    "SingleStreamDiT": "krea2 + reference, gqa",
    "NextDiT": "z-image",
    "OmniGen2Transformer2DModel": "omnigen2",
    "BooguTransformer2DModel": "boogu",
}
GUIDES = {"ltx, 2 guides ()", "ltx-2, 2 guides ()"}  # some elements belong to no patch alone
pytestmark = pytest.mark.usefixtures("comfyui_here")


def _flowing(name):
    """Returns the first case of a class that stages can compute in patches, or None."""
    return next((case for case in CASES[name] if case not in WHOLE), None)


def _call(model, inputs, rows=ROWS):
    args, kwargs = inputs(rows, *SIZE)
    kwargs["transformer_options"] = {}
    return ModuleCall(args, kwargs, rows, token_mode(type(model.module).__name__, kwargs))


@torch.inference_mode()
def _with_answer(model, inputs, rows=ROWS):
    """Returns (the model, a call of it, the answer of one process)."""
    call = _call(model, inputs, rows)
    return model, call, pack(alone(model, call))


@functools.cache
def _subjects():
    """Returns {class: {case: model, call and answer}}. Ranks forked afterwards have them too."""
    return {
        name: {case: _with_answer(tiny_model(build), inputs) for case, (build, inputs) in CASES[name].items()}
        for name in STAGED
    }


def _reference_at_zero(*size):
    """Returns inputs with a reference at timestep 0. Use one row: ComfyUI itself cannot compute two."""
    args, kwargs = tiny_inputs("flux2")(*size)
    return args, kwargs | {"ref_latents_method": "index_timestep_zero"}


def _case(layouts, subject, strategy=TWO):
    """Returns this rank's differences from one process: for whole images, for patches with the keys of that call, and
    for patches with other keys. If patches are impossible, "why whole" says why."""
    model, call, expected = subject
    forward, keys = make_module_forward(model, layouts, Placement(strategy)), StaleKeyCache()
    answer, stages = pack(forward(copy.deepcopy(call), keys=keys)), forward.stages
    found = {
        "whole": relative(answer, expected, expected.abs().max()),
        "why whole": stages.flow_blocked_by(call, keys),
    }
    if found["why whole"]:
        return found
    owners = stages.owners(copy.deepcopy(call), PATCHES, keys)
    found["owned"] = int(owners.min()) >= 0
    if not found["owned"]:
        return found
    split = ElementPatches(owners, answer.shape[1:], PATCHES)
    found["patches"] = difference_of_patches(stages, call, keys, split, expected, PATCHES)
    make_others(keys)
    ends = 0, PATCHES - 1
    found["other keys"] = difference_of_patches(stages, call, keys, split, expected, PATCHES, ends)
    return found


@torch.inference_mode()
def staged(world):
    layouts, sent, send = Layouts(world), [], P2PChannel.send

    def noted(self, tensor, to):
        sent.append((tensor, tensor.clone()))
        send(self, tensor, to)

    P2PChannel.send = noted  # in this forked rank only
    found = {}
    for name in STAGED:
        flowing = _flowing(name)
        for case, subject in _subjects()[name].items():
            for cut in (TWO, EARLY, LATE) if name in TWO_LISTS and case == flowing else (TWO,):
                found[f"{case} {cut.device_shares}"] = _case(layouts, subject, cut)
                found[f"{case} {cut.device_shares}"]["as sent"] = all(torch.equal(*both) for both in sent)
                sent.clear()
    at_zero = _with_answer(tiny_model(tiny_builder("flux2")), _reference_at_zero, 1)
    found["flux2 + reference at t=0"] = _case(layouts, at_zero)
    return found


def test_stages_of_each_class_give_what_one_process_gives_and_so_do_patches_with_keys_of_the_same_call():
    _subjects()
    first, last = run_ranks(staged, 2)
    for case, one in last.items():
        assert first[case].get("as sent", True), f"{case}: written into while it was on its way"
        assert max(one["whole"], first[case]["whole"]) <= EXACT, case
        assert one["why whole"] == first[case]["why whole"], case
        if not one["why whole"]:
            assert one["owned"] == (case not in GUIDES), case
        if one.get("owned"):
            assert one["patches"] <= EXACT < 1e-3 < one["other keys"], case
    whole = {case.split(" (")[0] for case, one in last.items() if one["why whole"]}
    assert whole == WHOLE


@torch.inference_mode()
def staged_with_shares(world):
    layouts, found = Layouts(world), {}
    for number, (name, cases) in enumerate(_subjects().items()):
        for case, subject in cases.items():
            if case in WHOLE or case == _flowing(name):
                # Blocks do not know which of the two axes their attention has, so each class has one of them.
                found[case] = _case(layouts, subject, IN_STAGES[(number + (case in WHOLE)) % 2])
    return found


def test_ranks_of_a_stage_share_out_tokens_of_images_and_of_patches():
    _subjects()
    *_, other, last = run_ranks(staged_with_shares, 4)
    for which, one in last.items():
        assert max(one["whole"], other[which]["whole"]) <= EXACT, which
        if one.get("owned"):
            assert max(one["patches"], other[which]["patches"]) <= EXACT < 1e-3 < one["other keys"], which
    assert {case for case, one in last.items() if one["why whole"]} == WHOLE - {"flux2 + reference at t=0"}


@torch.inference_mode()
def rounded(world):
    """Returns by strategy and exchange dtype: (difference from one process, bytes sent, notes, forward.exact)."""
    layouts, found = Layouts(world), {}
    build, inputs = CASES["WanModel"]["wan2.1 t2v"]
    model = tiny_model(build)
    call = _call(model, inputs)
    expected = alone(model, call)
    for strategy in (ULYSSES, RING):
        for dtype in (SAME, ROUNDED):
            options = ComputeOptions(exchange_dtype=dtype)
            forward = make_module_forward(model, layouts, Placement(strategy, compute_options=options))
            before = forward.bytes_sent
            far = relative(forward(copy.deepcopy(call)), expected, expected.abs().max())
            sent = forward.bytes_sent - before
            found[f"{strategy.describe()} {dtype}"] = far, sent, " ".join(forward.notes), forward.exact
    return found


def test_exchanges_within_a_stage_are_rounded_where_that_is_asked_for():
    (found, *_) = run_ranks(rounded, 4)
    for strategy in (ULYSSES, RING):
        far, sent, notes, exact = found[f"{strategy.describe()} {SAME}"]
        assert far <= EXACT and exact and not notes
        far, fewer, notes, exact = found[f"{strategy.describe()} {ROUNDED}"]
        assert EXACT < far < 0.1 and fewer < 0.8 * sent and "rounded to 8 bits" in notes and not exact


def _shorter(call):
    """Returns the same call with another prompt, which is three tokens shorter."""
    kwargs = call.kwargs | {"context": call.kwargs["context"][:, 3:]}
    if "num_tokens" in kwargs:
        kwargs["num_tokens"] -= 3
    return replace(call, kwargs=kwargs, prompts=(1,))


@torch.inference_mode()
def unlike(world):
    """Returns by case, each under one of the two strategies: (True if both prompts give each patch the same elements,
    largest difference of patches from one process for the longer prompt, the same for the shorter prompt)."""
    layouts, found = Layouts(world), {}
    for number, (name, case) in enumerate(TEXT_FIRST.items()):
        build, inputs = CASES[name][case]
        strategy = (ULYSSES, RING)[number % 2]
        model, keys = tiny_model(build), StaleKeyCache()
        longer = replace(_call(model, inputs), prompts=(0,))
        calls = (longer, _shorter(longer))
        expected = [alone(model, call) for call in calls]
        forward = make_module_forward(model, layouts, Placement(strategy))
        for call in calls:
            forward(copy.deepcopy(call), keys=keys)
        stages = forward.stages
        owners = [stages.owners(copy.deepcopy(call), PATCHES, keys) for call in calls]
        split = ElementPatches(owners[0], expected[0].shape[1:], PATCHES)
        far = [
            difference_of_patches(stages, call, keys, split, whole, PATCHES)
            for call, whole in zip(calls, expected, strict=True)
        ]
        found[case] = torch.equal(*owners) and int(owners[0].min()) >= 0, *far
    return found


def test_prompts_of_unlike_lengths_before_the_image_leave_the_cuts_where_they_are():
    *_, last = run_ranks(unlike, 4)
    assert set(last) == set(TEXT_FIRST.values())
    for case, (alike, longer, shorter) in last.items():
        assert alike and max(longer, shorter) <= EXACT, case
