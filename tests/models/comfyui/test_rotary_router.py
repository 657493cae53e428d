"""The rotation of queries and keys: each function of Comfy Kitchen that models call is routed, then restored."""

import pytest
import torch

from comfy_modules import import_comfyui_here
from parallel_backend.models.comfyui import rotary_router
from parallel_backend.models.comfyui.rotary_router import can_route, rotary_by
from parallel_backend.models.comfyui.tiny.weights import random

HEADS, TOKENS, CHANNELS = 2, 5, 8
HEADS_FIRST, TOKENS_FIRST = (1, HEADS, TOKENS, CHANNELS), (1, TOKENS, HEADS, CHANNELS)


@pytest.fixture(autouse=True)
def _comfyui():
    import_comfyui_here()


def _frequencies(shape):
    heads = shape.index(HEADS)
    return random(*(1 if dim == heads else size for dim, size in enumerate(shape[:3])), CHANNELS // 2, 2, 2)


def _swapped(apply, tensors, by, dim):
    """Rotates the two halves of the heads separately."""
    halves = [apply([t.chunk(2, dim)[half] for t in tensors], by) for half in range(2)]
    return [torch.cat(pair, dim) for pair in zip(*halves, strict=True)]


@pytest.mark.parametrize("shape", [HEADS_FIRST, TOKENS_FIRST], ids=["heads first", "tokens first"])
@pytest.mark.parametrize("name", ["apply_rope", "apply_rope1", "rms_rope_split_half", "rms_rope_split_half_"])
def test_each_kind_of_function_is_answered_with_where_its_heads_lie(name, shape):
    from comfy.quant_ops import ck

    count = 1 if name.endswith("1") else 2
    scales = (torch.ones(CHANNELS), torch.ones(CHANNELS)) if "rms" in name else ()

    def call():
        tensors = [random(*shape) for _ in range(count)]
        out = getattr(ck, name)(*tensors, _frequencies(shape), *scales)
        return [out] if count == 1 else list(out)

    dims, original, expected = [], getattr(ck, name), call()

    def rotate(apply, tensors, by, dim):
        dims.append(dim)
        return _swapped(apply, tensors, by, dim)

    with rotary_by(rotate):
        found = call()
    assert dims == [shape.index(HEADS)]
    assert all(torch.allclose(one, other) for one, other in zip(found, expected, strict=True))
    assert getattr(ck, name) is original


def test_a_comfyui_that_rotates_by_itself_is_seen(monkeypatch):
    from comfy.ldm.flux import math

    assert can_route()
    can_route.cache_clear()
    monkeypatch.setattr(math, "apply_rope", lambda q, k, by: (q, k))
    assert not can_route()
    can_route.cache_clear()
    monkeypatch.setattr(rotary_router, "_functions", dict)
    assert not can_route()
    monkeypatch.undo()
    can_route.cache_clear()
    assert can_route()
