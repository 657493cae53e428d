"""Torch's settings of how a device computes, which loaders and nodes of packs set in ComfyUI's process."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch.backends import cuda, cudnn

_Access = tuple[Callable[[], Any], Callable[[Any], Any]]  # how a setting is read, and set

# Once a program has set `fp32_precision`, torch raises an error where it reads `allow_tf32`, so that one comes first.
_OF_MATMUL = (
    "allow_tf32",
    "allow_fp16_accumulation",
    "allow_fp16_reduced_precision_reduction",
    "allow_bf16_reduced_precision_reduction",
    "fp32_precision",
)
_OF_CUDNN = ("enabled", "benchmark", "deterministic", "allow_tf32", "fp32_precision")


def _attribute(owner: Any, name: str) -> _Access:
    return partial(getattr, owner, name), partial(setattr, owner, name)


_SETTINGS: dict[str, _Access] = {
    "dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "deterministic": (
        lambda: (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        ),
        lambda is_on: torch.use_deterministic_algorithms(is_on[0], warn_only=is_on[1]),
    ),
    "flash_sdp": (cuda.flash_sdp_enabled, cuda.enable_flash_sdp),
    "mem_efficient_sdp": (cuda.mem_efficient_sdp_enabled, cuda.enable_mem_efficient_sdp),
    "math_sdp": (cuda.math_sdp_enabled, cuda.enable_math_sdp),
    "cudnn_sdp": (cuda.cudnn_sdp_enabled, cuda.enable_cudnn_sdp),
    "reduced_math_sdp": (
        cuda.fp16_bf16_reduction_math_sdp_allowed,
        cuda.allow_fp16_bf16_reduction_math_sdp,
    ),
    "float32_matmul_precision": (
        torch.get_float32_matmul_precision,
        torch.set_float32_matmul_precision,
    ),
    **{f"matmul.{name}": _attribute(cuda.matmul, name) for name in _OF_MATMUL},
    **{f"cudnn.{name}": _attribute(cudnn, name) for name in _OF_CUDNN},
}


def torch_settings() -> dict[str, Any]:
    """Returns the settings of this process by name, those that this version of torch has."""
    found = {}
    for name, (read, _) in _SETTINGS.items():
        with contextlib.suppress(AttributeError, RuntimeError):
            found[name] = read()
    return found


@contextlib.contextmanager
def computing_with(settings: Mapping[str, Any]) -> Iterator[None]:
    """Within this context, this process computes with the settings of another one."""
    before = torch_settings()
    _set(settings)
    try:
        yield
    finally:
        _set(before)


def _set(settings: Mapping[str, Any]) -> None:
    for name, value in settings.items():
        read, write = _SETTINGS[name]
        with contextlib.suppress(AttributeError, RuntimeError):
            if read() != value:
                write(value)
