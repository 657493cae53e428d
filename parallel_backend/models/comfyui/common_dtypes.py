"""ComfyUI's decisions on dtypes made alike on all ranks: a dtype is good where every rank's card is good at it.

ComfyUI asks the card that it runs on. On a box with cards of two generations or sizes ranks would compute in two
dtypes, or keep their weights in two, and exchange bytes that mean something else on the other side.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

# Of comfy.model_management, in 0.30; an older ComfyUI has fewer. Each takes the device first.
QUESTIONS = (
    "should_use_bf16",
    "should_use_fp16",
    "supports_fp8_compute",
    "supports_nvfp4_compute",
    "supports_mxfp8_compute",
)
# What it compares a model with to keep fp8 weights as they are, where a card does not multiply them and halves would
# not fit.
MEMORY = "get_total_memory"


@contextmanager
def agree_on_dtypes(management: Any, devices: Sequence[torch.device]) -> Iterator[None]:
    """Inside, `management` (comfy.model_management) answers each of QUESTIONS with yes only if it would for every one
    of `devices`, GPUs as this process numbers them, and names the memory of the smallest one."""
    stock = {name: getattr(management, name) for name in (*QUESTIONS, MEMORY) if hasattr(management, name)}
    if len(devices) > 1:
        for name, question in stock.items():
            answer = _least_memory if name == MEMORY else _of_all
            setattr(management, name, partial(answer, question, tuple(devices)))
    try:
        yield
    finally:
        for name, question in stock.items():
            setattr(management, name, question)


def _of_all(
    question: Callable[..., bool],
    devices: tuple[torch.device, ...],
    device: torch.device | None = None,
    *args: Any,
    **kwargs: Any,
) -> bool:
    if device is not None and torch.device(device).type == "cpu":
        return question(device, *args, **kwargs)
    return all(question(each, *args, **kwargs) for each in devices)


def _least_memory(
    question: Callable[..., Any],
    devices: tuple[torch.device, ...],
    dev: torch.device | None = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Bytes. By properties, for which no rank makes a context on the cards of the others."""
    if args or kwargs or (dev is not None and torch.device(dev).type == "cpu"):
        return question(dev, *args, **kwargs)
    return min(torch.cuda.get_device_properties(each).total_memory for each in devices)
