"""Rows: the images of one model call, and how they are picked and put together for a rank. Pure functions."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ..requests import Conditioning, Extras


@dataclass(frozen=True)
class Rows:
    """Images that share one prompt. x [r, C, h, w] float32, sigma [r] float32, conditioning rows 1 or r.

    `extras`: rows 1 or r, still where they arrived: a rank moves what it needs of them.
    """

    x: Tensor
    sigma: Tensor
    conditioning: Conditioning
    extras: Extras = field(default_factory=Extras)


def take(rows: list[Rows], wanted: slice) -> list[Rows]:
    """The rows numbered `wanted` over all entries, conditioning expanded to one line per row."""
    taken, first = [], 0
    for entry in rows:
        count = len(entry.x)
        begin, end = max(wanted.start - first, 0), min(wanted.stop - first, count)
        first += count
        if begin < end:
            part = slice(begin, end)
            prompt = _lines_of_prompt(entry.conditioning, count, part)
            extras = _lines_of_extras(entry.extras, count, part)
            taken.append(Rows(entry.x[part], entry.sigma[part], prompt, extras))
    return taken


def _lines(tensor: Tensor | None, count: int, part: slice) -> Tensor | None:
    return None if tensor is None else tensor.expand(count, *tensor.shape[1:])[part]


def _lines_of_prompt(prompt: Conditioning, count: int, part: slice) -> Conditioning:
    return Conditioning(
        *(_lines(tensor, count, part) for tensor in (prompt.context, prompt.pooled, prompt.guidance))
    )


def _lines_of_extras(extras: Extras, count: int, part: slice) -> Extras:
    if not extras:
        return extras
    shared = {id(r): _lines(r, count, part) for r in extras.residuals.values()}  # by several blocks
    return Extras(
        references=tuple(_lines(latent, count, part) for latent in extras.references),
        places=extras.places,
        mask=_lines(extras.mask, count, part),
        residuals={block: shared[id(r)] for block, r in extras.residuals.items()},
    )


def batched(rows: list[Rows]) -> list[Rows]:
    """Neighbours whose prompts have the same length go through the model together."""
    batches: list[Rows] = []
    for entry in rows:
        if batches and _same_form(batches[-1], entry):
            batches[-1] = _joined(batches[-1], entry)
        else:
            batches.append(entry)
    return batches


def _same_form(one: Rows, other: Rows) -> bool:
    if one.extras or other.extras:
        return False
    one, other = one.conditioning, other.conditioning
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
