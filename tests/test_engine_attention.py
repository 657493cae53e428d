"""Kernel choice as a table, and attention in parts against attention over all keys at once."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from parallel_backend.engine.attention import (
    KERNEL_VARIABLE,
    attend,
    attend_with_lse,
    choose_kernel,
    kernel_for,
    merge,
)
from parallel_backend.errors import RequestError

HOPPER, AMPERE, TURING = (9, 0), (8, 6), (7, 5)
FLASH_2, FLASH_3 = {"flash_attn"}, {"flash_attn", "flash_attn_interface"}


@pytest.mark.parametrize(
    ("device", "dtype", "capability", "installed", "kernel"),
    [
        ("cpu", torch.bfloat16, HOPPER, FLASH_3, "native"),
        ("cuda", torch.float32, HOPPER, FLASH_3, "native"),
        ("cuda", torch.bfloat16, HOPPER, FLASH_3, "_flash_3"),
        ("cuda", torch.float16, HOPPER, FLASH_2, "_native_cudnn"),
        ("cuda", torch.bfloat16, HOPPER, set(), "_native_cudnn"),
        ("cuda", torch.bfloat16, AMPERE, FLASH_3, "flash"),
        ("cuda", torch.bfloat16, AMPERE, set(), "native"),
        ("cuda", torch.float16, TURING, FLASH_3, "native"),
    ],
)
def test_the_fastest_exact_kernel_that_can_run_is_chosen(device, dtype, capability, installed, kernel):
    assert choose_kernel(device, dtype, capability, installed) == kernel


def test_a_kernel_is_used_on_request_and_a_misspelt_one_refused(monkeypatch):
    cpu = torch.device("cpu")
    assert kernel_for(cpu, torch.float32) == "native"
    monkeypatch.setenv(KERNEL_VARIABLE, "sage")
    assert kernel_for(cpu, torch.float32) == "sage"
    monkeypatch.setenv(KERNEL_VARIABLE, "saige")
    with pytest.raises(RequestError, match=r"saige.*sage"):
        kernel_for(cpu, torch.float32)


def _tensors(keys: int, queries: int = 5):
    generator = torch.Generator().manual_seed(keys)
    return [torch.randn(2, 3, n, 16, generator=generator) for n in (queries, keys, keys)]


def test_attention_in_uneven_parts_equals_attention_over_all_keys():
    query, key, value = _tensors(keys=11)
    parts = (attend_with_lse(query, key[:, :, a:b], value[:, :, a:b]) for a, b in ((0, 1), (1, 8), (8, 11)))
    expected = F.scaled_dot_product_attention(query, key, value)
    torch.testing.assert_close(merge(parts, torch.float32), expected, rtol=1e-5, atol=1e-6)


def test_the_log_sum_exp_is_that_of_the_scores():
    query, key, value = _tensors(keys=7)
    out, lse = attend_with_lse(query, key, value)
    scores = query @ key.transpose(-1, -2) / 4
    torch.testing.assert_close(lse, scores.logsumexp(-1), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(out, attend(query, key, value, None, "native"), rtol=1e-5, atol=1e-6)


def test_a_kernel_of_diffusers_gives_the_same_as_torchs_own():
    query, key, value = _tensors(keys=7)
    expected = attend(query, key, value, None, "native")
    torch.testing.assert_close(
        attend(query, key, value, None, "_native_math"), expected, rtol=1e-5, atol=1e-6
    )
