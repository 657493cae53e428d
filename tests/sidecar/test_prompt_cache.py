"""Prompts and masks that the ranks hold are known without a copy: by identity, else by a comparison on their device."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from parallel_backend.errors import RequestError
from parallel_backend.requests import Conditioning, Extras, PredictRequest
from parallel_backend.sidecar.prompt_cache import MASKS, PROMPTS, KnownOfModel
from parallel_backend.wire.arena import ArenaWriter
from parallel_backend.wire.payloads import predict_tensors

WIDTH = 4096
LARGE = 512 * WIDTH  # numbers of a prompt


class LargeOperations(TorchDispatchMode):
    """The operators that read as many numbers as a prompt has."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "aten" and any(isinstance(a, torch.Tensor) and a.numel() == LARGE for a in args):
            self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))

    def take(self):
        views = {"view", "detach", "alias", "slice"}
        taken, self.names = [name for name in self.names if name not in views], []
        return taken


@pytest.fixture
def arena():
    writer = ArenaWriter()
    yield writer
    writer.release()


def request(context, mask=None):
    prompt = Conditioning(context, torch.ones(1, 8))
    return PredictRequest(torch.zeros(1, 16, 4, 4), torch.ones(1), prompt, Extras(mask=mask))


def send(known, arena, context):
    """As ModelRequests.predict; whether the prompt went along."""
    call = request(context)
    prompt = call.conditioning
    _, is_new = known.prompts.find((prompt.context, prompt.pooled, prompt.guidance))
    arena.place(predict_tensors(call, with_conditioning=is_new))
    return is_new


def test_a_prompt_is_read_and_copied_once_and_compared_where_it_is(arena):
    known, context = KnownOfModel(), torch.randn(1, 512, WIDTH)
    with LargeOperations() as seen:
        assert send(known, arena, context)
        # Kept beside its owner's, summed to see that it has numbers, and handed over.
        assert sorted(seen.take()) == ["clone", "copy_", "sum"]
        for _ in range(3):
            assert not send(known, arena, context)
        assert seen.take() == []
        like = context.clone()  # as ComfyUI makes one for every call
        seen.take()
        assert not send(known, arena, like)
        assert seen.take() == ["equal"]
        assert not send(known, arena, like)
        assert seen.take() == []
        like.add_(1)  # its owner writes into it
        seen.take()
        assert send(known, arena, like)
        assert sorted(seen.take()) == ["clone", "copy_", "equal", "sum"]


def test_a_prompt_of_inference_mode_is_compared_each_time(arena):
    known = KnownOfModel()
    with torch.inference_mode():  # where ComfyUI runs, and writes are not counted
        context = torch.ones(1, 512, WIDTH)
        assert send(known, arena, context) and not send(known, arena, context)
        context.add_(1)
        assert send(known, arena, context)


def test_prompts_and_masks_have_keys_of_their_own_and_the_oldest_go():
    known = KnownOfModel()
    prompts = [(torch.full((2,), float(n)), torch.ones(1), None) for n in range(PROMPTS + 1)]
    masks = [(torch.full((4,), float(n)),) for n in range(MASKS + 1)]
    keys = [known.prompts.find(prompt)[0] for prompt in prompts] + [
        known.masks.find(mask)[0] for mask in masks
    ]
    assert len(set(keys)) == len(keys) and min(keys) == 1
    assert known.take_forgotten() == (keys[0], keys[PROMPTS + 1]) and known.take_forgotten() == ()
    assert known.prompts.find(prompts[1]) == (keys[1], False) and known.prompts.find(prompts[0])[1]
    assert known.masks.find((masks[2][0].clone(),)) == (keys[-1], False)
    known.masks.drop(keys[-1])
    assert known.masks.find(masks[2])[1]


def test_guidance_and_dtype_make_another_prompt():
    known, one = KnownOfModel(), torch.ones(1)
    assert known.prompts.find((one, one, None))[1] and known.prompts.find((one, one, one))[1]
    assert known.prompts.find((one.double(), one, None))[1] and not known.prompts.find((one, one, None))[1]


def test_a_mask_travels_once_and_numbers_that_are_none_are_refused_however_often():
    mask = torch.zeros(1, 3 + 4, 3 + 4)
    call = request(torch.ones(1, 3, 8), mask)
    assert "mask" in predict_tensors(call, True) and "mask" not in predict_tensors(
        call, True, with_mask=False
    )
    bad = replace(call, extras=Extras(residuals={0: torch.full((1, 4, 8), float("nan"))}))
    for _ in range(2):
        with pytest.raises(RequestError, match="NaN or infinite"):
            predict_tensors(bad, True)
