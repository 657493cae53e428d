"""Arguments of model calls on a rank: each call gets its own, in memory that the call before is done with."""

from __future__ import annotations

import pytest
import torch

from parallel_backend.errors import TransportError
from parallel_backend.models.comfyui.patches import ARGUMENT
from parallel_backend.rank.kept_arguments import KeptArguments
from parallel_backend.wire.arguments import Kept, kept_tensors, pack_arguments


@pytest.fixture
def arguments():
    return KeptArguments(torch.device("cpu"))


def take(arguments, args, kwargs=None, keep=None, forget=()):
    return arguments.take(pack_arguments((args, kwargs or {})) | kept_tensors(keep or {}), forget)


def places(tensors):
    return [tensor.data_ptr() for tensor in tensors]


def test_copies_of_a_call_lie_where_those_of_the_last_one_lay(arguments):
    x, other = torch.randn(3, 4), torch.randn(3, 4)
    before, _ = take(arguments, (x, other))
    where = places(before)
    assert not set(where) & set(places((x, other))) and len(set(where)) == 2
    for tensor in before:
        tensor.fill_(7.0)  # as a module may
    after, _ = take(arguments, (other, x))
    assert set(places(after)) == set(where)
    assert torch.equal(after[0], other) and torch.equal(after[1], x)


def test_calls_of_other_shapes_and_kinds_get_memory_of_their_own(arguments):
    (first,), _ = take(arguments, (torch.ones(3, 4),))
    (wider,), _ = take(arguments, (torch.ones(4, 3),))
    (whole,), _ = take(arguments, (torch.ones(4, 3, dtype=torch.int64),))
    assert first.shape == (3, 4) and wider.shape == (4, 3) and whole.dtype == torch.int64
    assert torch.equal(first, torch.ones(3, 4))


def test_what_is_kept_stays_as_it_was_whatever_a_module_writes(arguments):
    prompt = torch.randn(2, 5)
    for number in range(3):
        _, kwargs = take(arguments, (), {"context": Kept(1)}, {} if number else {1: prompt})
        assert torch.equal(kwargs["context"], prompt)
        kwargs["context"].zero_()
    with pytest.raises(TransportError):
        take(arguments, (), {"context": Kept(1)}, forget=(1,))


def test_one_tensor_in_two_places_is_one(arguments):
    x = torch.randn(2, 3)
    (one, other), kwargs = take(arguments, (x, x), {"again": x})
    assert one is other is kwargs["again"]


def test_what_comfyui_leaves_in_host_memory_stays_there_and_all_else_goes_to_the_device():
    """Its BaseModel moves tensors and lists of them; what lies deeper, modules read on the host."""
    arguments, device = KeptArguments(torch.device("meta")), torch.device("meta")
    tags, frame, prompt = torch.arange(9), torch.randn(2, 3), torch.randn(2, 5)
    kwargs = {
        "context": Kept(1),
        "ref_latents": [prompt, None],
        "minimax_payload": {"text_token_tags": tags, "cond_video_latents": [Kept(2)]},
        "guide_attention_entries": [{"strength": 0.5, "pixel_mask": frame}],
        "control": {"output": [prompt]},
        "transformer_options": {"sigmas": prompt},
        ARGUMENT: {"weights": Kept(3)},
    }
    for keep in ({1: prompt, 2: frame, 3: prompt}, {}):
        (x,), found = take(arguments, (prompt,), kwargs, keep)
        there = (
            x,
            found["context"],
            found["ref_latents"][0],
            found["control"]["output"][0],
            found["transformer_options"]["sigmas"],
            found[ARGUMENT]["weights"],
        )
        assert all(tensor.device == device for tensor in there)
        assert torch.equal(found["minimax_payload"]["text_token_tags"], tags)
        assert torch.equal(found["minimax_payload"]["cond_video_latents"][0], frame)
        assert torch.equal(found["guide_attention_entries"][0]["pixel_mask"], frame)
