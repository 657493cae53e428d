"""Rows: the images of one model call, and how they are picked and put together for a rank. Pure functions."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..requests import Conditioning


@dataclass(frozen=True)
class Rows:
    """Images that share one prompt. x [r, C, h, w] float32, sigma [r] float32, conditioning rows 1 or r."""

    x: Tensor
    sigma: Tensor
    conditioning: Conditioning


def take(rows: list[Rows], wanted: slice) -> list[Rows]:
    """The rows numbered `wanted` over all entries, conditioning expanded to one line per row."""
    taken, first = [], 0
    for entry in rows:
        count = len(entry.x)
        begin, end = max(wanted.start - first, 0), min(wanted.stop - first, count)
        first += count
        if begin < end:
            part = slice(begin, end)
            taken.append(Rows(entry.x[part], entry.sigma[part], _lines(entry.conditioning, count, part)))
    return taken


def _lines(prompt: Conditioning, count: int, part: slice) -> Conditioning:
    def lines(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor.expand(count, *tensor.shape[1:])[part]

    return Conditioning(lines(prompt.context), lines(prompt.pooled), lines(prompt.guidance))


def batched(rows: list[Rows]) -> list[Rows]:
    """Neighbours whose prompts have the same length go through the model together."""
    batches: list[Rows] = []
    for entry in rows:
        if batches and _same_form(batches[-1].conditioning, entry.conditioning):
            batches[-1] = _joined(batches[-1], entry)
        else:
            batches.append(entry)
    return batches


def _same_form(one: Conditioning, other: Conditioning) -> bool:
    return one.context.shape[1:] == other.context.shape[1:] and (one.guidance is None) == (
        other.guidance is None
    )


def _joined(one: Rows, other: Rows) -> Rows:
    a, b = one.conditioning, other.conditioning
    prompt = replace(
        a,
        context=torch.cat([a.context, b.context]),
        pooled=torch.cat([a.pooled, b.pooled]),
        guidance=None if a.guidance is None else torch.cat([a.guidance, b.guidance]),
    )
    return Rows(torch.cat([one.x, other.x]), torch.cat([one.sigma, other.sigma]), prompt)
