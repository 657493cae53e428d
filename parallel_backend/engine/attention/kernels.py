"""Attention on one rank: the kernels that compute it, with or without the log-sum-exp that a ring needs.

All tensors are [B, H, S, D]. A mask is additive or boolean and broadcasts to [B, H, S_q, S_k].
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from diffusers.models.attention_dispatch import dispatch_attention_fn
from torch import Tensor

from ...models.attention import Attend, AttentionCall
from ...options import APPROXIMATE_KERNELS

HEAD_DIM = 128  # of most models; kernels are tested with it before they are chosen (kernel_choice.py)
OVERRIDE = "optimized_attention_override"  # key in transformer_options: another pack's attention
TORCH = "torch"  # torch's scaled_dot_product_attention
HALVES = (torch.float16, torch.bfloat16)
_AMPERE = (8, 0)
# A score this low has no weight in any softmax. Unlike -infinity it gives no NaN if a mask hides all keys of a part.
_MASKED = -1e30
WithLse = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Kernel:
    """An attention kernel that can replace scaled_dot_product_attention. `diffusers`: its name in diffusers; `package`:
    the package to import, None if torch has it; `install`: the package to install; `least`, `most`: range of compute
    capabilities; `auto`: the capability from which on it is the fastest exact kernel if installed, None for never;
    `with_lse`: computes (out, log-sum-exp), None if it cannot; `nvidia`: True if it has no build for ROCm."""

    name: str
    diffusers: str
    package: str | None
    install: str
    least: tuple[int, int]
    auto: tuple[int, int] | None
    with_lse: WithLse | None
    most: tuple[int, int] = (99, 0)
    nvidia: bool = False


def _cudnn_with_lse(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    # Called by its aten operator, cuDNN gives wrong numbers for other strides (diffusers' attention_dispatch).
    query, key, value = (tensor.contiguous() for tensor in (query, key, value))
    out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(query, key, value, None, True)
    return out, lse


def _flash_with_lse(backend: str, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    out, lse = _dispatch(query, key, value, backend, return_lse=True)
    # diffusers returns the lse of _flash_3 as [B, S, H].
    return out.transpose(1, 2), lse.transpose(1, 2) if backend == "_flash_3" else lse


# Fastest first. FlashAttention 3 is for Hopper. cuDNN's fused attention comes with torch and is faster than torch's
# FlashAttention 2 from Hopper on. SageAttention quantises, so "auto" never chooses it.
KERNELS = (
    Kernel(
        "flash_3",
        "_flash_3",
        "flash_attn_interface",
        "flash_attn_3",
        least=(9, 0),
        auto=(9, 0),
        with_lse=partial(_flash_with_lse, "_flash_3"),
        most=(9, 9),
        nvidia=True,
    ),
    Kernel("cudnn", "_native_cudnn", None, "", _AMPERE, (9, 0), _cudnn_with_lse, nvidia=True),
    Kernel("flash", "flash", "flash_attn", "flash-attn", _AMPERE, _AMPERE, partial(_flash_with_lse, "flash")),
    Kernel("sage", "sage", "sageattention", "sageattention", _AMPERE, None, None),
)
BY_NAME = {kernel.name: kernel for kernel in KERNELS}


def capability_of(device: torch.device) -> tuple[int, int]:
    """Returns CUDA's compute capability; (0, 0) without a GPU. ROCm counts differently: gfx942 is (9, 4)."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)


def attend(query: Tensor, key: Tensor, value: Tensor, kernel: str) -> Tensor:
    """Returns softmax(q k^T / sqrt(D)) v, [B, H, S_q, D]."""
    if not query.numel():  # a rank may have no tokens, and kernels cannot launch on none
        return torch.empty_like(query)
    if kernel == TORCH:
        return F.scaled_dot_product_attention(query, key, value)
    return _dispatch(query, key, value, BY_NAME[kernel].diffusers).transpose(1, 2)


def _dispatch(query: Tensor, key: Tensor, value: Tensor, backend: str, **options: Any) -> Any:
    """Returns what diffusers' dispatcher gives; its tensors are [B, S, H, D]."""
    swapped = (t.transpose(1, 2) for t in (query, key, value))
    return dispatch_attention_fn(*swapped, backend=backend, attention_kwargs=options)


def attend_with_lse(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, kernel: str = TORCH
) -> tuple[Tensor, Tensor]:
    """Returns attention and the natural log-sum-exp of its scores, [B, H, S_q] float32, for merging partial results.

    `mask`: additive, in the queries' dtype; with a mask torch's operators compute. `kernel`: one with a `with_lse`.
    """
    if not query.numel():
        return torch.empty_like(query), query.new_empty(query.shape[:3], dtype=torch.float32)
    if kernel != TORCH and mask is None:
        with_lse = BY_NAME[kernel].with_lse
        assert with_lse is not None, "kernel_for was told of the ring"
        out, lse = with_lse(query, key, value)
        if lse.ndim == 4:  # cuDNN returns [B, H, S, 1] since torch 2.9
            lse = lse.squeeze(-1)
    elif query.device.type == "cpu":
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, attn_mask=mask
        )
    elif mask is None and _takes_flash_operator(query):
        out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(query, key, value)
    else:
        bias = None if mask is None else _aligned(mask).expand(*query.shape[:3], key.shape[2])
        out, lse, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(query, key, value, bias, True)
    return out, lse[..., : query.shape[2]].float()  # some kernels pad their rows


def additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Turns a mask of ComfyUI's functions into one to add to the scores: [B or 1, H or 1, S_q or 1, S_k]."""
    if mask.dtype == torch.bool:
        mask = torch.zeros(mask.shape, device=mask.device).masked_fill_(~mask, _MASKED)
    while mask.ndim < 4:
        mask = mask.unsqueeze(0 if mask.ndim == 2 else 1)
    return mask.float().clamp(min=max(_MASKED, torch.finfo(dtype).min)).to(dtype)


def _takes_flash_operator(query: Tensor) -> bool:
    """Returns True if torch's FlashAttention 2 supports `query`: 16-bit on Ampere or newer. Older cards take the
    memory-efficient operator, and so does ROCm, because its support differs by card."""
    if query.dtype not in HALVES or torch.version.hip is not None:
        return False
    return capability_of(query.device) >= _AMPERE


def _aligned(mask: Tensor) -> Tensor:
    """Copies a mask so that its rows begin at multiples of 16 elements, as the memory-efficient kernel requires."""
    keys = mask.shape[-1]
    return F.pad(mask, (0, -keys % 16))[..., :keys]


def merge(parts: Iterable[tuple[Tensor, Tensor]], dtype: torch.dtype) -> Tensor:
    """Merges (out, lse) over disjoint sets of keys into attention over all of them, weighted by a softmax over lse.

    Ring Attention (Liu et al. 2023), §3. Accumulates in float32.
    """
    parts = iter(parts)
    out, total = next(parts)  # there is at least one set of keys
    out, total = out.float(), total.unsqueeze(-1)
    for part, lse in parts:
        lse = lse.unsqueeze(-1)
        both = torch.logaddexp(total, lse)
        out = out * torch.exp(total - both) + part.float() * torch.exp(lse - both)
        total = both
    return out.to(dtype)


def attend_by(name: str, library: Attend, call: AttentionCall) -> Tensor:
    """Answers a call by kernel `name` (options.ATTENTION_KERNELS, not "auto"), or by the library where that cannot run.
    For one name, an attention.Replacement."""
    given = call.q, call.k, call.v
    if call.skip_reshape:
        is_plain = all((t.shape[1], t.shape[3]) == (call.heads, HEAD_DIM) for t in given)
    else:
        is_plain = all(t.shape[2:] == (call.heads * HEAD_DIM,) for t in given)
    if call.mask is not None or not is_plain or not _takes(name, call.q.dtype, call.options):
        return library(call)
    by_heads = call.by_heads()
    return call.shaped(attend(by_heads.q, by_heads.k, by_heads.v, name))


def _takes(name: str, dtype: torch.dtype, options: Mapping[str, Any]) -> bool:
    if options.get("scale") is not None or (options.get("transformer_options") or {}).get(OVERRIDE):
        return False
    needs_exact = options.get("low_precision_attention") is False
    is_fit = name == TORCH or dtype in HALVES
    return is_fit and not (needs_exact and name in APPROXIMATE_KERNELS)
