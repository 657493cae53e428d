"""The prompts of a plain job as calls of a module with ComfyUI's signature; prompts of one shape share a call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from ..models.tokens.table import token_mode
from ..requests import Conditioning, ModuleCall, Rows

Compute = Callable[[ModuleCall], Any]


def answers_to(rows: list[Rows], module: torch.nn.Module, compute: Compute) -> list[Tensor]:
    """Returns the module's answer [r, C, h, w] float32 to each entry. Neighbouring entries whose prompts have the same
    shape go into one call."""
    found: list[Tensor] = []
    for _, same in groupby(rows, _form):
        entries = list(same)
        numbers = range(len(found), len(found) + len(entries))
        answer: Tensor = compute(_call(entries, module, tuple(numbers)))
        found += answer.float().split([len(entry.x) for entry in entries])
    return found


def _form(entry: Rows) -> tuple[torch.Size, bool]:
    prompt = entry.conditioning
    return prompt.context.shape[1:], prompt.guidance is None


def _call(rows: Sequence[Rows], module: torch.nn.Module, prompts: tuple[int, ...]) -> ModuleCall:
    def joined(of: Callable[[Rows], Tensor]) -> Tensor:
        return torch.cat([of(entry).expand(len(entry.x), *of(entry).shape[1:]) for entry in rows])

    kwargs = {
        "context": joined(lambda r: r.conditioning.context),
        "y": joined(lambda r: r.conditioning.pooled),
    }
    if rows[0].conditioning.guidance is not None:
        kwargs["guidance"] = joined(lambda r: _guidance(r.conditioning))
    args = joined(lambda r: r.x), joined(lambda r: r.sigma)
    return ModuleCall(args, kwargs, len(args[0]), token_mode(type(module).__name__, kwargs), prompts)


def _guidance(prompt: Conditioning) -> Tensor:
    assert prompt.guidance is not None, "prompts of one call are alike"
    return prompt.guidance
