"""attend_by, which replaces ComfyUI's attention: its answers, and the calls that it leaves to ComfyUI's function."""

import pytest
import torch
from torch.nn import functional as F

from parallel_backend.engine.attention import kernels
from parallel_backend.engine.attention.kernels import HEAD_DIM, attend_by
from parallel_backend.models.attention import AttentionCall

HEADS = 2


def tensors(dtype=torch.float32, tokens=(5, 7, 7), dim=HEAD_DIM, heads=HEADS):
    """Returns q, k and v, [1, S, H D] each."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, n, heads * dim, generator=generator).to(dtype) for n in tokens]


def by_heads(q, k, v):
    return [t.reshape(1, t.shape[1], HEADS, -1).transpose(1, 2) for t in (q, k, v)]


def refused(*args, **kwargs):
    raise AssertionError("ComfyUI's own function was called")


@pytest.mark.parametrize("skip_reshape", [False, True])
@pytest.mark.parametrize("skip_output_reshape", [False, True])
def test_it_answers_as_comfyuis_functions_do(skip_reshape, skip_output_reshape):
    q, k, v = tensors()
    expected = F.scaled_dot_product_attention(*by_heads(q, k, v))
    given = by_heads(q, k, v) if skip_reshape else (q, k, v)
    shapes = {"skip_reshape": skip_reshape, "skip_output_reshape": skip_output_reshape}
    call = AttentionCall(*given, HEADS, **shapes, options={"transformer_options": {}})
    found = attend_by("torch", refused, call)
    assert torch.equal(found, expected if skip_output_reshape else expected.transpose(1, 2).flatten(2))


@pytest.mark.parametrize(
    ("name", "dtype", "changes"),
    [
        ("torch", torch.float32, {"mask": torch.zeros(5, 7)}),
        ("torch", torch.float32, {"options": {"scale": 0.5}}),
        (
            "torch",
            torch.float32,
            {"options": {"transformer_options": {"optimized_attention_override": refused}}},
        ),
        ("sage", torch.float32, {}),
        ("sage", torch.bfloat16, {"options": {"low_precision_attention": False}}),
    ],
)
def test_calls_that_a_kernel_cannot_answer_stay_comfyuis(monkeypatch, name, dtype, changes):
    monkeypatch.setattr(kernels, "attend", refused)
    call = AttentionCall(*tensors(dtype), HEADS, **changes)
    assert attend_by(name, lambda given: given, call) is call


@pytest.mark.parametrize("sizes", [{"dim": 64}, {"heads": 3}])
def test_other_heads_than_it_was_tried_with_stay_comfyuis(monkeypatch, sizes):
    monkeypatch.setattr(kernels, "attend", refused)
    call = AttentionCall(*tensors(**sizes), HEADS)
    assert attend_by("torch", lambda given: given, call) is call


def test_a_kernel_is_asked_by_its_name(monkeypatch):
    asked = []

    def attend(q, k, v, kernel):
        asked.append((kernel, tuple(q.shape)))
        return q

    monkeypatch.setattr(kernels, "attend", attend)
    call = AttentionCall(*tensors(torch.bfloat16), HEADS, options={"low_precision_attention": True})
    attend_by("sage", refused, call)
    assert asked == [("sage", (1, HEADS, 5, HEAD_DIM))]
