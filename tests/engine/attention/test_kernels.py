"""Kernel choice as a table, and attention in parts against attention over all keys at once."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from parallel_backend.engine.attention.kernels import (
    KERNELS,
    attend,
    attend_with_lse,
    choose_kernel,
    dispatched,
    kernel_for,
    merge,
    why_not,
)
from parallel_backend.errors import RequestError
from parallel_backend.options import APPROXIMATE_KERNELS, ATTENTION_KERNELS

BLACKWELL, HOPPER, AMPERE, TURING = (10, 0), (9, 0), (8, 6), (7, 5)
FLASH_2, FLASH_3 = {"flash_attn"}, {"flash_attn", "flash_attn_interface"}


@pytest.mark.parametrize(
    ("device", "dtype", "capability", "installed", "kernel"),
    [
        ("cpu", torch.bfloat16, HOPPER, FLASH_3, "torch"),
        ("cuda", torch.float32, HOPPER, FLASH_3, "torch"),
        ("cuda", torch.bfloat16, HOPPER, FLASH_3, "flash_3"),
        ("cuda", torch.float16, HOPPER, FLASH_2, "cudnn"),
        ("cuda", torch.bfloat16, HOPPER, set(), "cudnn"),
        ("cuda", torch.bfloat16, BLACKWELL, FLASH_3, "cudnn"),
        ("cuda", torch.bfloat16, AMPERE, FLASH_3, "flash"),
        ("cuda", torch.bfloat16, AMPERE, {"sageattention"}, "torch"),
        ("cuda", torch.float16, TURING, FLASH_3, "torch"),
    ],
)
def test_the_fastest_exact_kernel_that_can_run_is_chosen(device, dtype, capability, installed, kernel):
    assert choose_kernel(device, dtype, capability, installed) == kernel


EVERYTHING = {kernel.package for kernel in KERNELS}


@pytest.mark.parametrize(
    ("name", "device", "dtype", "capability", "installed", "words"),
    [
        ("sage", "cpu", torch.bfloat16, (0, 0), EVERYTHING, "needs a GPU"),
        ("cudnn", "cuda", torch.float32, HOPPER, EVERYTHING, "weight_dtype bfloat16"),
        ("flash_3", "cuda", torch.bfloat16, AMPERE, EVERYTHING, "9.x (Hopper), and this GPU has 8.6"),
        ("flash_3", "cuda", torch.bfloat16, BLACKWELL, EVERYTHING, "has 10.0"),
        ("flash", "cuda", torch.float16, TURING, EVERYTHING, "8.0 or more, and this GPU has 7.5"),
        ("sage", "cuda", torch.float16, AMPERE, FLASH_3, "pip install sageattention"),
        ("sage", "cuda", torch.float16, AMPERE, EVERYTHING, None),
    ],
)
def test_what_a_kernel_lacks_is_said(name, device, dtype, capability, installed, words):
    kernel = next(kernel for kernel in KERNELS if kernel.name == name)
    reason = why_not(kernel, device, dtype, capability, installed)
    assert reason is None if words is None else words in reason


def test_a_kernel_that_cannot_run_here_is_refused_with_the_remedy():
    cpu = torch.device("cpu")
    assert [kernel_for(cpu, torch.float32, wish) for wish in ("auto", "torch")] == ["torch", "torch"]
    for wish in ATTENTION_KERNELS[2:]:
        with pytest.raises(
            RequestError, match=rf"attention {wish} cannot run on cpu: .* Choose attention auto"
        ):
            kernel_for(cpu, torch.float32, wish)


def test_every_kernel_that_a_person_can_choose_is_known():
    assert {kernel.name for kernel in KERNELS} | {"auto", "torch"} == set(ATTENTION_KERNELS)
    assert not {kernel.name for kernel in KERNELS if kernel.auto} & set(APPROXIMATE_KERNELS)


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
    torch.testing.assert_close(out, attend(query, key, value, None, "torch"), rtol=1e-5, atol=1e-6)


def test_a_kernel_of_diffusers_gives_the_same_as_torchs_own():
    query, key, value = _tensors(keys=7)
    expected = attend(query, key, value, None, "torch")
    torch.testing.assert_close(dispatched(query, key, value, "_native_math"), expected, rtol=1e-5, atol=1e-6)
