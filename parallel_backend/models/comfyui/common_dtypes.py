"""ComfyUI's decisions on dtypes made alike on all ranks: a dtype is good where every rank's card is good at it.

ComfyUI asks the card that it runs on. On a box with cards of two generations ranks would compute in two dtypes, and
exchange bytes that mean something else on the other side.
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


@contextmanager
def asked_of_all(management: Any, devices: Sequence[torch.device]) -> Iterator[None]:
    """Inside, `management` (comfy.model_management) answers each of QUESTIONS with yes only if it would for every one
    of `devices`, GPUs as this process numbers them."""
    stock = {name: getattr(management, name) for name in QUESTIONS if hasattr(management, name)}
    if len(devices) > 1:
        for name, question in stock.items():
            setattr(management, name, partial(_of_all, question, tuple(devices)))
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
