"""Attention over parts of the keys, merged by log-sum-exp, equals attention over all keys, with every such kernel."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from parallel_backend.engine.attention import kernels
from parallel_backend.engine.attention.kernels import KERNELS, _dispatch, attend, attend_with_lse, merge


def _tensors(keys: int, queries: int = 5):
    generator = torch.Generator().manual_seed(keys)
    return [torch.randn(2, 3, n, 16, generator=generator) for n in (queries, keys, keys)]


def test_a_kernel_of_diffusers_gives_the_same_as_torchs_own():
    query, key, value = _tensors(keys=7)
    expected = attend(query, key, value, "torch")
    found = _dispatch(query, key, value, "_native_math").transpose(1, 2)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def _lse(query, key):
    return (query @ key.mT / query.shape[-1] ** 0.5).logsumexp(-1)


def _as_diffusers(query, key, value, *, backend, attention_kwargs):
    """Fakes FlashAttention through diffusers: tensors [B, S, H, D], and FlashAttention 3's log-sum-exp [B, S, H]."""
    assert attention_kwargs == {"return_lse": True}
    query, key, value = (tensor.transpose(1, 2) for tensor in (query, key, value))
    lse = _lse(query, key)
    out = F.scaled_dot_product_attention(query, key, value).transpose(1, 2)
    return out, lse.transpose(1, 2) if backend == "_flash_3" else lse


def _cudnn(*, trailing):
    def attend(query, key, value, bias, compute_lse):
        lse = _lse(query, key)
        return F.scaled_dot_product_attention(query, key, value), lse.unsqueeze(-1) if trailing else lse

    return attend


@pytest.mark.parametrize("name", [kernel.name for kernel in KERNELS if kernel.with_lse])
@pytest.mark.parametrize("trailing", [False, True])  # cuDNN's log-sum-exp has a last dim of 1 since torch 2.9
def test_parts_of_every_kernel_merge_to_attention_over_all_keys(monkeypatch, name, trailing):
    monkeypatch.setattr(kernels, "dispatch_attention_fn", _as_diffusers)
    monkeypatch.setattr(torch.ops.aten, "_scaled_dot_product_cudnn_attention", _cudnn(trailing=trailing))
    # As many queries as heads: the shape alone does not show a wrong order.
    query, key, value = _tensors(keys=11, queries=3)
    parts = [
        attend_with_lse(query, key[:, :, a:b], value[:, :, a:b], kernel=name)
        for a, b in ((0, 1), (1, 8), (8, 11))
    ]
    assert {lse.shape for _, lse in parts} == {query.shape[:3]}
    expected = F.scaled_dot_product_attention(query, key, value)
    torch.testing.assert_close(merge(parts, torch.float32), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("capability", "hip", "dtype", "operator"),
    [
        ((8, 6), None, torch.bfloat16, "flash"),
        ((8, 0), None, torch.float16, "flash"),
        ((7, 5), None, torch.float16, "efficient"),
        ((9, 0), None, torch.float32, "efficient"),
        ((9, 4), "6.4", torch.bfloat16, "efficient"),
    ],
)
def test_a_ring_below_ampere_takes_the_memory_efficient_operator(
    monkeypatch, capability, hip, dtype, operator
):
    called = []

    def stand_in(name):
        def attend(query, key, value, *rest):
            called.append(name)
            rows = 32  # both operators pad the log-sum-exp
            return value[:, :, : query.shape[2]], torch.zeros(*query.shape[:2], rows, device="meta")

        return attend

    for name in ("flash", "efficient"):
        monkeypatch.setattr(torch.ops.aten, f"_scaled_dot_product_{name}_attention", stand_in(name))
    monkeypatch.setattr(kernels, "capability_of", lambda device: capability)  # the tensors are on no GPU
    monkeypatch.setattr(torch.version, "hip", hip)
    query = torch.empty(1, 2, 5, 64, dtype=dtype, device="meta")
    _, lse = attend_with_lse(query, query, query)
    assert called == [operator] and lse.shape == (1, 2, 5)
