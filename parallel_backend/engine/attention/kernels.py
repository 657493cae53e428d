"""Attention on one rank: the kernels that compute it, with or without the log-sum-exp that a ring needs.

All tensors are [B, H, S, D]; a mask is additive or boolean and broadcasts to [B, H, S_q, S_k].
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from diffusers.models.attention_dispatch import dispatch_attention_fn
from torch import Tensor

from ...options import APPROXIMATE_KERNELS

HEAD_DIM = 128  # of most models, with which kernels are tried before they are chosen (kernel_choice.py)
_OVERRIDE = "optimized_attention_override"  # of a call's transformer_options: a pack's own attention
TORCH = "torch"  # its own scaled_dot_product_attention
HALVES = (torch.float16, torch.bfloat16)
_AMPERE = (8, 0)
# Scores this low have no weight in any softmax, and unlike infinity they leave no NaN where a mask hides all keys of a
# part.
_MASKED = -1e30
WithLse = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Kernel:
    """A kernel beside torch's own. `diffusers`: its name there; `package`: to import, None for torch's own;
    `install`: the package to install; `least`, `most`: compute capabilities; `auto`: from which one on it is the
    fastest exact one where it is installed, None for never; `with_lse`: it and the log-sum-exp, None where it gives
    none; `nvidia`: it has no build for ROCm."""

    name: str
    diffusers: str
    package: str | None
    install: str
    least: tuple[int, int]
    auto: tuple[int, int] | None
    with_lse: WithLse | None
    most: tuple[int, int] = (99, 0)
    nvidia: bool = False


def _flash_3_with_lse(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    out, lse = _dispatch(query, key, value, "_flash_3", return_lse=True)
    return out.transpose(1, 2), lse.transpose(1, 2)  # diffusers has it as [B, S, H]


def _cudnn_with_lse(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    # From its aten operator cuDNN gives wrong numbers for other strides (diffusers' attention_dispatch).
    query, key, value = (tensor.contiguous() for tensor in (query, key, value))
    out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(query, key, value, None, True)
    return out, lse


def _flash_with_lse(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    out, lse = _dispatch(query, key, value, "flash", return_lse=True)
    return out.transpose(1, 2), lse


# Best first. FlashAttention 3 is for Hopper; cuDNN's fused attention comes with torch and is ahead of torch's
# FlashAttention 2 from Hopper on. SageAttention quantises, so it is never chosen unasked.
KERNELS = (
    Kernel(
        "flash_3",
        "_flash_3",
        "flash_attn_interface",
        "flash_attn_3",
        least=(9, 0),
        auto=(9, 0),
        with_lse=_flash_3_with_lse,
        most=(9, 9),
        nvidia=True,
    ),
    Kernel("cudnn", "_native_cudnn", None, "", _AMPERE, (9, 0), _cudnn_with_lse, nvidia=True),
    Kernel("flash", "flash", "flash_attn", "flash-attn", _AMPERE, _AMPERE, _flash_with_lse),
    Kernel("sage", "sage", "sageattention", "sageattention", _AMPERE, None, None),
)
BY_NAME = {kernel.name: kernel for kernel in KERNELS}


def capability_of(device: torch.device) -> tuple[int, int]:
    """CUDA's compute capability; (0, 0) for no GPU. On ROCm another count: gfx942 is (9, 4)."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, kernel: str) -> Tensor:
    """softmax(q k^T / sqrt(D)) v, [B, H, S_q, D]."""
    if not query.numel():  # a rank may have no tokens, and kernels have no launch for that
        return torch.empty_like(query)
    if kernel == TORCH or mask is not None:
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
    return dispatched(query, key, value, BY_NAME[kernel].diffusers)


def dispatched(query: Tensor, key: Tensor, value: Tensor, backend: str) -> Tensor:
    """The same by a kernel that diffusers calls `backend`."""
    return _dispatch(query, key, value, backend).transpose(1, 2)


def _dispatch(query: Tensor, key: Tensor, value: Tensor, backend: str, **options: Any) -> Any:
    """diffusers' answer, whose tensors are [B, S, H, D]."""
    swapped = (t.transpose(1, 2) for t in (query, key, value))
    return dispatch_attention_fn(*swapped, backend=backend, attention_kwargs=options)


def attend_with_lse(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, kernel: str = TORCH
) -> tuple[Tensor, Tensor]:
    """The same with the natural log-sum-exp of the scores, [B, H, S_q] float32, for merging partial results.

    `mask`: additive, in the queries' dtype; torch's own operators take one. `kernel`: one that has it (`with_lse`).
    """
    if not query.numel():
        return torch.empty_like(query), query.new_empty(query.shape[:3], dtype=torch.float32)
    if kernel != TORCH and mask is None:
        with_lse = BY_NAME[kernel].with_lse
        assert with_lse is not None, "kernel_for was told of the ring"
        out, lse = with_lse(query, key, value)
        if lse.ndim == 4:  # cuDNN's is [B, H, S, 1] since torch 2.9
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
    """[B or 1, H or 1, S_q or 1, S_k], added to the scores, from the masks that ComfyUI's functions take."""
    if mask.dtype == torch.bool:
        mask = torch.zeros(mask.shape, device=mask.device).masked_fill_(~mask, _MASKED)
    while mask.ndim < 4:
        mask = mask.unsqueeze(0 if mask.ndim == 2 else 1)
    return mask.float().clamp(min=max(_MASKED, torch.finfo(dtype).min)).to(dtype)


def _takes_flash_operator(query: Tensor) -> bool:
    """Whether torch's FlashAttention 2 computes it: halves on Ampere or newer. Older cards, and ROCm, whose support
    differs by card, take the memory-efficient one."""
    if query.dtype not in HALVES or torch.version.hip is not None:
        return False
    return capability_of(query.device) >= _AMPERE


def _aligned(mask: Tensor) -> Tensor:
    """The same in memory whose rows begin where the memory-efficient kernel wants them: at multiples of 16."""
    keys = mask.shape[-1]
    return F.pad(mask, (0, -keys % 16))[..., :keys]


def merge(parts: Iterable[tuple[Tensor, Tensor]], dtype: torch.dtype) -> Tensor:
    """Attention over all keys from (out, lse) over disjoint sets of them: a softmax over lse weighs the parts.

    Ring Attention (Liu et al. 2023), §3; accumulated in float32.
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


class ChosenKernel:
    """`name`: one of options.ATTENTION_KERNELS but auto. Where it cannot answer a call, ComfyUI's own function does."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(
        self,
        original: Callable[..., Tensor],
        q: Tensor,
        k: Tensor,
        v: Tensor,
        heads: int,
        mask: Tensor | None = None,
        skip_reshape: bool = False,
        skip_output_reshape: bool = False,
        **others: Any,
    ) -> Tensor:
        """As ComfyUI's attention functions."""
        by_head: tuple[Tensor, ...] = (q, k, v)
        if not skip_reshape and q.shape[-1] == k.shape[-1] == v.shape[-1] == heads * HEAD_DIM:
            by_head = tuple(t.reshape(*t.shape[:2], heads, HEAD_DIM).transpose(1, 2) for t in (q, k, v))
        is_plain = all(t.ndim == 4 and (t.shape[1], t.shape[3]) == (heads, HEAD_DIM) for t in by_head)
        if mask is not None or not is_plain or not self._takes(q.dtype, others):
            shapes = {"skip_reshape": skip_reshape, "skip_output_reshape": skip_output_reshape}
            return original(q, k, v, heads, mask=mask, **shapes, **others)
        out = attend(by_head[0], by_head[1], by_head[2], None, self.name)
        return out if skip_output_reshape else out.transpose(1, 2).flatten(2)

    def _takes(self, dtype: torch.dtype, others: dict[str, Any]) -> bool:
        if others.get("scale") is not None or (others.get("transformer_options") or {}).get(_OVERRIDE):
            return False
        needs_exact = others.get("low_precision_attention") is False
        is_fit = self.name == TORCH or dtype in HALVES
        return is_fit and not (needs_exact and self.name in APPROXIMATE_KERNELS)
