"""Attention on one rank: which kernel computes it, with or without the log-sum-exp that a ring needs.

All tensors are [B, H, S, D]; a mask is additive or boolean and broadcasts to [B, H, S_q, S_k].
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from importlib.util import find_spec

import torch
import torch.nn.functional as F
from diffusers.models.attention_dispatch import AttentionBackendName, dispatch_attention_fn
from torch import Tensor

from ..errors import RequestError

# diffusers' own variable: a kernel by its name there, such as `sage` or `flash`. A ring does not use it: its partial
# results are merged by log-sum-exp, which torch's own kernels return.
KERNEL_VARIABLE = "DIFFUSERS_ATTN_BACKEND"

# diffusers' names of the kernels that beat torch's own, best first, with the package each needs and the least compute
# capability. FlashAttention 3 is for Hopper; cuDNN's fused attention comes with torch and is ahead of torch's
# FlashAttention 2 from Hopper on. SageAttention quantises, so it is never chosen unasked.
_KERNELS = (
    ("_flash_3", "flash_attn_interface", (9, 0)),
    ("_native_cudnn", None, (9, 0)),
    ("flash", "flash_attn", (8, 0)),
)


def choose_kernel(
    device_type: str, dtype: torch.dtype, capability: tuple[int, int], installed: set[str]
) -> str:
    """diffusers' name of the fastest exact kernel; `native` is torch's scaled_dot_product_attention."""
    if device_type != "cuda" or dtype not in (torch.float16, torch.bfloat16):
        return "native"
    for name, package, least in _KERNELS:
        if capability >= least and (package is None or package in installed):
            return name
    return "native"


def installed_packages() -> set[str]:
    return {package for _, package, _ in _KERNELS if package and find_spec(package)}


def kernel_for(device: torch.device, dtype: torch.dtype) -> str:
    """The kernel that the user named in KERNEL_VARIABLE, else the fastest exact one that is installed."""
    if wished := os.environ.get(KERNEL_VARIABLE):
        known = [backend.value for backend in AttentionBackendName]
        if wished not in known:
            raise RequestError(
                f"{KERNEL_VARIABLE}={wished} is no attention kernel; choose one of {', '.join(known)}."
            )
        return wished
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
    return choose_kernel(device.type, dtype, capability, installed_packages())


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, kernel: str) -> Tensor:
    """softmax(q k^T / sqrt(D)) v, [B, H, S_q, D]."""
    if kernel == "native" or mask is not None:
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
    swapped = (t.transpose(1, 2) for t in (query, key, value))  # diffusers keeps [B, S, H, D]
    return dispatch_attention_fn(*swapped, backend=kernel).transpose(1, 2)


def attend_with_lse(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The same with the natural log-sum-exp of the scores, [B, H, S_q] float32, for merging partial results.

    `mask`: additive, in the queries' dtype.
    """
    if query.device.type == "cpu":
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, attn_mask=mask
        )
    elif mask is None and query.dtype in (torch.float16, torch.bfloat16):
        out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(query, key, value)
    else:
        bias = None if mask is None else _aligned(mask).expand(*query.shape[:3], key.shape[2])
        out, lse, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(query, key, value, bias, True)
        lse = lse[..., : query.shape[2]]  # the kernel pads its rows to a multiple of 32
    return out, lse.float()


def _aligned(mask: Tensor) -> Tensor:
    """The same in memory whose rows begin where the memory-efficient kernel wants them: at multiples of 16."""
    keys = mask.shape[-1]
    return F.pad(mask, (0, -keys % 16))[..., :keys]


def merge(parts: Iterable[tuple[Tensor, Tensor]], dtype: torch.dtype) -> Tensor:
    """Attention over all keys from (out, lse) over disjoint sets of them: a softmax over lse weighs the parts.

    Ring Attention (Liu et al. 2023), §3; accumulated in float32.
    """
    total, out = None, None
    for part, lse in parts:
        lse = lse.unsqueeze(-1)
        if out is None:
            out, total = part.float(), lse
            continue
        both = torch.logaddexp(total, lse)
        out = out * torch.exp(total - both) + part.float() * torch.exp(lse - both)
        total = both
    assert out is not None, "there is at least one set of keys"
    return out.to(dtype)
