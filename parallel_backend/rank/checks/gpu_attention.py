"""Compares each installed attention kernel, alone and merged as in a ring, with attention in float32."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from ...engine.attention import kernel_choice, kernels
from ...engine.attention.kernels import BY_NAME, HEAD_DIM, TORCH
from ...options import APPROXIMATE_KERNELS, ATTENTION_KERNELS
from ...wire.checks.findings import Finding

_HEADS = {"cpu": 2, "cuda": 12}  # 12: Flux.1's 24 heads on two ranks
# Largest difference, relative to the largest value. bfloat16 rounds by 0.004, a quantised kernel by a few percent.
LIMIT, LIMIT_QUANTISED = 0.02, 0.2
_TIMED = 3  # runs; the fastest counts
_TORCH_INSTEAD = "choose attention: torch, and report it"
_NO_RING = "prefer Ulysses or CFG to Ring, and report it"


def check_attention(device: torch.device, tokens: int) -> list[Finding]:
    """Checks all kernels on [1, H, `tokens`, 128], with the strides that an exchange of Ulysses leaves."""
    query, key, value = ulysses_layout(device, tokens, _HEADS[device.type])
    expected = exact(query, key, value)
    names = [name for name in ATTENTION_KERNELS if name != "auto"]
    found = [_kernel(name, query, key, value, expected) for name in names]
    return [*found, *_merges(names, query, key, value, expected)]


def ulysses_layout(device: torch.device, tokens: int, heads: int) -> tuple[Tensor, ...]:
    """Returns query, key, value [1, H, S, D] bfloat16 as sequence.to_heads gives them: views of one [S, 3, 1, H, D]."""
    generator = torch.Generator().manual_seed(0)  # on the CPU: the same numbers on every GPU
    numbers = torch.randn(tokens, 3, 1, heads, HEAD_DIM, generator=generator)
    exchanged = numbers.to(device, torch.bfloat16)
    return tuple(exchanged[:, n].permute(1, 2, 0, 3) for n in range(3))


def exact(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Returns softmax(q k^T / sqrt(D)) v in float32, computed head by head to save memory."""
    heads = []
    for head in range(query.shape[1]):
        q, k, v = (t[:, head].float() for t in (query, key, value))
        heads.append(torch.softmax(q @ k.mT / q.shape[-1] ** 0.5, dim=-1) @ v)
    return torch.stack(heads, dim=1)


def difference(out: Tensor, expected: Tensor) -> float:
    """Returns the largest difference relative to the largest value; infinity for NaN."""
    found = ((out.float() - expected).abs().max() / expected.abs().max()).item()
    return found if found == found else float("inf")


def judge(name: str, found: float, limit: float, remedy: str, seconds: float = 0.0) -> Finding:
    words = f"off by {found:.1e} of the largest value from float32"
    if seconds:
        words += f", {seconds * 1e3:.2f} ms"
    if found <= limit:
        return Finding(name, "ok", words)
    return Finding(name, "broken", f"{words}, where {limit:g} is rounding: pictures would be wrong", remedy)


def _kernel(name: str, query: Tensor, key: Tensor, value: Tensor, expected: Tensor) -> Finding:
    if reason := _why_not(name, query):
        return Finding(name, "skipped", reason)
    try:
        out, seconds = _timed(lambda: kernels.attend(query, key, value, name), query.device)
    except Exception as error:  # a build that does not fit this torch fails in its own way
        return _raised(name, error, _TORCH_INSTEAD)
    limit = LIMIT_QUANTISED if name in APPROXIMATE_KERNELS else LIMIT
    remedy = f"{_TORCH_INSTEAD}; a newer build of {name} may help"
    return judge(name, difference(out, expected), limit, remedy, seconds)


def _merges(
    names: list[str], query: Tensor, key: Tensor, value: Tensor, expected: Tensor
) -> Iterator[Finding]:
    """Merges the results over two shares of the keys as a ring does, with each kernel that runs here and returns a
    log-sum-exp, and with the one that takes masks.

    The shares are an eighth and the rest: two halves have about equal log-sum-exps, which would hide an error in them.
    """
    cut = key.shape[2] // 8
    parts = [(key[:, :, :cut], value[:, :, :cut]), (key[:, :, cut:], value[:, :, cut:])]

    def merged(kernel: str, masked: bool) -> Tensor:
        masks = [query.new_zeros(1, 1, query.shape[2], k.shape[2]) if masked else None for k, _ in parts]
        results = [
            kernels.attend_with_lse(query, k, v, mask, kernel)
            for (k, v), mask in zip(parts, masks, strict=True)
        ]
        return kernels.merge(results, query.dtype)

    for kernel, masked in [*((name, False) for name in names), (TORCH, True)]:
        if kernel in BY_NAME and (BY_NAME[kernel].with_lse is None or _why_not(kernel, query)):
            continue  # a ring does not use it, or _kernel has reported the reason
        name = "merge with a mask" if masked else f"merge by {kernel}"
        remedy = _NO_RING if kernel == TORCH else _TORCH_INSTEAD
        try:
            yield judge(name, difference(merged(kernel, masked), expected), LIMIT, remedy)
        except Exception as error:
            yield _raised(name, error, remedy)


def _why_not(name: str, query: Tensor) -> str | None:
    """Returns why a kernel cannot run here, in a user's words; None if it can."""
    return kernel_choice.why_not(BY_NAME[name], query.device, query.dtype) if name in BY_NAME else None


def _raised(name: str, error: Exception, remedy: str) -> Finding:
    return Finding(name, "broken", f"{type(error).__name__}: {error}"[:500], remedy)


@torch.inference_mode()
def _timed(run: Callable[[], Tensor], device: torch.device) -> tuple[Tensor, float]:
    """Returns (result, seconds of the fastest run)."""
    out, fastest = run(), float("inf")
    for _ in range(_TIMED if device.type == "cuda" else 1):
        _synchronize(device)
        began = time.perf_counter()
        out = run()
        _synchronize(device)
        fastest = min(fastest, time.perf_counter() - began)
    return out, fastest


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
