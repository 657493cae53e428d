"""The prompts of a plain job as calls of a module with ComfyUI's signature; prompts of one shape share a call."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from ..models.tokens.table import token_mode
from ..requests import ModuleCall, Rows

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
    def joined(tensors: Iterable[Tensor]) -> Tensor:
        pairs = zip(rows, tensors, strict=True)
        return torch.cat([one.expand(len(entry.x), *one.shape[1:]) for entry, one in pairs])

    prompts_of = [entry.conditioning for entry in rows]
    kwargs = {
        "context": joined(one.context for one in prompts_of),
        "y": joined(one.pooled for one in prompts_of),
    }
    guidances = [one.guidance for one in prompts_of if one.guidance is not None]
    if guidances:  # prompts of one call all have it, or none has
        kwargs["guidance"] = joined(guidances)
    args = joined(entry.x for entry in rows), joined(entry.sigma for entry in rows)
    return ModuleCall(args, kwargs, len(args[0]), token_mode(type(module).__name__, kwargs), prompts)
