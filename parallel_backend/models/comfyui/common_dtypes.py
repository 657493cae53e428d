"""Makes ComfyUI choose the same dtypes on all ranks: a dtype is supported only if every rank's card supports it.

ComfyUI asks only the card that it runs on. With cards of two generations or sizes, ranks would compute or store weights
in different dtypes, and misread the bytes that they exchange.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

# Functions of comfy.model_management (0.30; older versions have fewer). Each takes the device first.
QUESTIONS = (
    "should_use_bf16",
    "should_use_fp16",
    "supports_fp8_compute",
    "supports_nvfp4_compute",
    "supports_mxfp8_compute",
)
# If a card cannot multiply fp8, ComfyUI keeps fp8 weights only if 16-bit ones would not fit: it compares the model's
# size with this.
MEMORY = "get_total_memory"


@contextmanager
def agree_on_dtypes(management: Any, devices: Sequence[torch.device]) -> Iterator[None]:
    """Makes `management` (comfy.model_management) answer each of QUESTIONS with True only if it holds for all `devices`
    (GPUs, as this process numbers them), and MEMORY with that of the smallest one, in the `with` block."""
    stock = {name: getattr(management, name) for name in (*QUESTIONS, MEMORY) if hasattr(management, name)}

    def of_all(question: Callable[..., bool], device: Any = None, *args: Any, **kwargs: Any) -> bool:
        if _is_cpu(device):
            return question(device, *args, **kwargs)
        return all(question(each, *args, **kwargs) for each in devices)

    def least_memory(question: Callable[..., Any], dev: Any = None, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs or _is_cpu(dev):
            return question(dev, *args, **kwargs)
        # Reading device properties creates no CUDA context on other ranks' cards.
        return min(torch.cuda.get_device_properties(each).total_memory for each in devices)

    if len(devices) > 1:
        for name, question in stock.items():
            setattr(management, name, partial(least_memory if name == MEMORY else of_all, question))
    try:
        yield
    finally:
        for name, question in stock.items():
            setattr(management, name, question)


def _is_cpu(device: Any) -> bool:
    return device is not None and torch.device(device).type == "cpu"
