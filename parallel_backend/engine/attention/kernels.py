"""Attention on one rank: which kernel computes it, with or without the log-sum-exp that a ring needs.

All tensors are [B, H, S, D]; a mask is additive or boolean and broadcasts to [B, H, S_q, S_k].
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.util import find_spec

import torch
import torch.nn.functional as F
from diffusers.models.attention_dispatch import dispatch_attention_fn
from torch import Tensor

from ...errors import RequestError

TORCH = "torch"  # its own scaled_dot_product_attention
_HALVES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Kernel:
    """A kernel beside torch's own. `diffusers`: its name there; `package`: to import, None for torch's own;
    `install`: the package to install; `least`, `most`: compute capabilities; `auto`: from which one on it is the
    fastest exact one where it is installed, None for never."""

    name: str
    diffusers: str
    package: str | None
    install: str
    least: tuple[int, int]
    auto: tuple[int, int] | None
    most: tuple[int, int] = (99, 0)


# Best first. FlashAttention 3 is for Hopper; cuDNN's fused attention comes with torch and is ahead of torch's
# FlashAttention 2 from Hopper on. SageAttention quantises, so it is never chosen unasked.
KERNELS = (
    Kernel("flash_3", "_flash_3", "flash_attn_interface", "flash_attn_3", (9, 0), (9, 0), most=(9, 9)),
    Kernel("cudnn", "_native_cudnn", None, "", (8, 0), (9, 0)),
    Kernel("flash", "flash", "flash_attn", "flash-attn", (8, 0), (8, 0)),
    Kernel("sage", "sage", "sageattention", "sageattention", (8, 0), None),
)
_BY_NAME = {kernel.name: kernel for kernel in KERNELS}


def choose_kernel(
    device_type: str, dtype: torch.dtype, capability: tuple[int, int], installed: set[str]
) -> str:
    """The name of the fastest exact kernel."""
    for kernel in KERNELS:
        if kernel.auto is None or capability < kernel.auto:
            continue
        if why_not(kernel, device_type, dtype, capability, installed) is None:
            return kernel.name
    return TORCH


def why_not(
    kernel: Kernel, device_type: str, dtype: torch.dtype, capability: tuple[int, int], installed: set[str]
) -> str | None:
    """Why a kernel cannot compute in `dtype` on a device, in a user's words; None when it should."""
    if device_type != "cuda":
        return f"it needs a GPU, and this rank computes on the {device_type.upper()}"
    if dtype not in _HALVES:
        return (
            f"it computes in bfloat16 or float16, and this model in {str(dtype).removeprefix('torch.')}; "
            "weight_dtype bfloat16 would change that"
        )
    if not kernel.least <= capability <= kernel.most:
        wanted = "9.x (Hopper)" if kernel.most[0] == 9 else f"{kernel.least[0]}.{kernel.least[1]} or more"
        return f"it needs compute capability {wanted}, and this GPU has {capability[0]}.{capability[1]}"
    if kernel.package is not None and kernel.package not in installed:
        return f"its package is not installed (pip install {kernel.install})"
    return None


def installed_packages() -> set[str]:
    return {kernel.package for kernel in KERNELS if kernel.package and find_spec(kernel.package)}


def kernel_for(device: torch.device, dtype: torch.dtype, wish: str = "auto") -> str:
    """The kernel `wish` (options.ATTENTION_KERNELS), with auto the fastest exact one that is installed.

    Raises RequestError for one that cannot run here.
    """
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
    if wish == "auto":
        return choose_kernel(device.type, dtype, capability, installed_packages())
    if wish == TORCH:
        return TORCH
    reason = why_not(_BY_NAME[wish], device.type, dtype, capability, installed_packages())
    reason = reason or _fault_of(wish, device, dtype)
    if reason is not None:
        raise RequestError(
            f"attention {wish} cannot run on {device}: {reason}. Choose attention auto or torch."
        )
    return wish


@functools.cache
def _fault_of(name: str, device: torch.device, dtype: torch.dtype) -> str | None:
    """The error of a kernel that runs once, or None. A build for another torch fails in its own way."""
    one = torch.zeros(1, 1, 64, 128, device=device, dtype=dtype)
    try:
        with torch.inference_mode():
            attend(one, one, one, None, name)
            torch.cuda.synchronize(device)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        return f"it does not work here ({type(error).__name__}: {error})"[:400]
    return None


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, kernel: str) -> Tensor:
    """softmax(q k^T / sqrt(D)) v, [B, H, S_q, D]."""
    if not query.numel():  # a rank may have no tokens, and kernels have no launch for that
        return torch.empty_like(query)
    if kernel == TORCH or mask is not None:
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
    return dispatched(query, key, value, _BY_NAME[kernel].diffusers)


def dispatched(query: Tensor, key: Tensor, value: Tensor, backend: str) -> Tensor:
    """The same by a kernel that diffusers calls `backend`."""
    swapped = (t.transpose(1, 2) for t in (query, key, value))  # diffusers keeps [B, S, H, D]
    return dispatch_attention_fn(*swapped, backend=backend).transpose(1, 2)


def attend_with_lse(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The same with the natural log-sum-exp of the scores, [B, H, S_q] float32, for merging partial results.

    `mask`: additive, in the queries' dtype.
    """
    if not query.numel():
        return torch.empty_like(query), query.new_empty(query.shape[:3], dtype=torch.float32)
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
    parts = iter(parts)
    out, total = next(parts)  # there is at least one set of keys
    out, total = out.float(), total.unsqueeze(-1)
    for part, lse in parts:
        lse = lse.unsqueeze(-1)
        both = torch.logaddexp(total, lse)
        out = out * torch.exp(total - both) + part.float() * torch.exp(lse - both)
        total = both
    return out.to(dtype)
