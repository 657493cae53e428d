"""The choice of a rank's attention kernel: the fastest that is installed, fits the device and passes a test on it.

An import that succeeds proves little. A build for another torch, an unsupported GPU or an old driver fails in the first
step or gives wrong numbers. So each kernel is tried once per process before it is chosen.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from importlib.util import find_spec

import torch
from torch import Tensor

from ...errors import RequestError
from ...options import APPROXIMATE_KERNELS
from .kernels import BY_NAME, HALVES, KERNELS, TORCH, Kernel, attend, attend_with_lse, capability_of

# Largest allowed errors against attention in float32 on values of order 1. bf16 rounds by some thousandths and
# SageAttention by some hundredths; a broken kernel is off by much more.
_EXACT, _APPROXIMATE = 0.05, 0.2


@dataclass(frozen=True)
class KernelChoice:
    """The kernel to use. `name`: one of options.ATTENTION_KERNELS; `notes`: for users, on each faster one that does not
    work here."""

    name: str
    notes: tuple[str, ...] = ()


def kernel_for(
    device: torch.device, dtype: torch.dtype, wish: str = "auto", *, ring: bool = False, head_dim: int = 128
) -> KernelChoice:
    """Returns the kernel `wish` (options.ATTENTION_KERNELS), or for "auto" the fastest exact one that works.

    `ring`: the kernel must return the log-sum-exp; if `wish` does not, "auto" chooses instead. `head_dim`: 128 in most
    models. Raises RequestError if `wish` cannot run here.
    """
    if wish == TORCH:
        return KernelChoice(TORCH)
    if wish == "auto":
        return _fastest(device, dtype, ring, head_dim)
    without_lse = ring and BY_NAME[wish].with_lse is None
    reason = why_not(BY_NAME[wish], device, dtype) or fault_of(
        wish, device, dtype, ring and not without_lse, head_dim
    )
    if reason is not None:
        raise RequestError(
            f"attention {wish} cannot run on {device}: {reason}. Choose attention auto or torch."
        )
    return _fastest(device, dtype, ring, head_dim) if without_lse else KernelChoice(wish)


@functools.cache
def _fastest(device: torch.device, dtype: torch.dtype, ring: bool, head_dim: int) -> KernelChoice:
    notes: list[str] = []
    for kernel in candidates(device, dtype):
        if ring and kernel.with_lse is None:
            continue
        fault = fault_of(kernel.name, device, dtype, ring, head_dim)
        if fault is None:
            return KernelChoice(kernel.name, tuple(notes))
        notes.append(f"attention passed over {kernel.name}: {fault}")
    return KernelChoice(TORCH, tuple(notes))


def candidates(device: torch.device, dtype: torch.dtype) -> list[Kernel]:
    """Returns the exact kernels that should run here, faster than torch's own, the fastest first."""
    capability = capability_of(device)
    return [
        kernel
        for kernel in KERNELS
        if kernel.auto is not None and capability >= kernel.auto and why_not(kernel, device, dtype) is None
    ]


def why_not(kernel: Kernel, device: torch.device, dtype: torch.dtype) -> str | None:
    """Returns why a kernel cannot compute in `dtype` on a device of this process, with the packages installed here,
    worded for users; None if it should work."""
    if device.type != "cuda":
        return f"it needs a GPU, and this process computes on the {device.type.upper()}"
    capability, rocm = capability_of(device), torch.version.hip is not None
    if rocm and kernel.nvidia:
        return "it is for NVIDIA's GPUs, and this is ROCm"
    if dtype not in HALVES:
        return (
            f"it computes in bfloat16 or float16, and this model in {str(dtype).removeprefix('torch.')}; "
            "weight_dtype bfloat16 would change that"
        )
    if not rocm and not kernel.least <= capability <= kernel.most:
        requested = "9.x (Hopper)" if kernel.most[0] == 9 else f"{kernel.least[0]}.{kernel.least[1]} or more"
        return f"it needs compute capability {requested}, and this GPU has {capability[0]}.{capability[1]}"
    if kernel.package is not None and find_spec(kernel.package) is None:
        return f"its package is not installed (pip install {kernel.install})"
    return None


@functools.cache
def fault_of(name: str, device: torch.device, dtype: torch.dtype, ring: bool, head_dim: int) -> str | None:
    """Tries a kernel once; returns what went wrong, worded for users, or None."""
    limit = _APPROXIMATE if name in APPROXIMATE_KERNELS else _EXACT
    try:
        with torch.inference_mode():
            for query, key, value in _as_delivered(device, dtype, head_dim):
                error = _error(name, query, key, value, ring)
                if not error < limit:
                    return f"it is off by {error:.2g} from exact attention"
    except Exception as error:
        return f"it does not work here ({type(error).__name__}: {error})"[:400]
    return None


def _as_delivered(
    device: torch.device, dtype: torch.dtype, head_dim: int
) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Returns two sets of test queries, keys and values [1, 2, S, D] with the strides of real ones: after an exchange
    between ranks (tokens before heads, tensors of one message side by side), and after a projection."""
    generator = torch.Generator().manual_seed(0)

    def values(*shape: int) -> Tensor:
        return torch.randn(*shape, head_dim, generator=generator).to(device, dtype)

    queries = values(72, 3, 1, 2)[:, 0].permute(1, 2, 0, 3)
    keys, others = (values(40, 2, 1, 2)[:, n].permute(1, 2, 0, 3) for n in range(2))
    query, key, value = (values(1, 72, 2).transpose(1, 2) for _ in range(3))
    return [(queries, keys, others), (query, key, value)]


def _error(name: str, query: Tensor, key: Tensor, value: Tensor, ring: bool) -> float:
    """Returns the largest deviation from attention in float32; over a ring also that of the log-sum-exp."""
    scores = query.float() @ key.float().mT / query.shape[-1] ** 0.5
    exact = scores.softmax(dim=-1) @ value.float()
    if not ring:
        return (attend(query, key, value, name).float() - exact).abs().max().item()
    out, lse = attend_with_lse(query, key, value, kernel=name)
    errors = torch.stack([(out.float() - exact).abs().max(), (lse - scores.logsumexp(dim=-1)).abs().max()])
    return errors.max().item()
