"""Rows of a model call, picked and put together for a rank. Pure functions."""

from __future__ import annotations

import torch
from torch import Tensor

from ..requests import Conditioning, Extras, Rows


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


def _lines(tensor: Tensor, count: int, part: slice) -> Tensor:
    return tensor.expand(count, *tensor.shape[1:])[part]


def _lines_or_none(tensor: Tensor | None, count: int, part: slice) -> Tensor | None:
    return None if tensor is None else _lines(tensor, count, part)


def _lines_of_prompt(prompt: Conditioning, count: int, part: slice) -> Conditioning:
    return Conditioning(
        _lines(prompt.context, count, part),
        _lines(prompt.pooled, count, part),
        _lines_or_none(prompt.guidance, count, part),
    )


def _lines_of_extras(extras: Extras, count: int, part: slice) -> Extras:
    if not extras:
        return extras
    shared = {id(r): _lines(r, count, part) for r in extras.residuals.values()}  # by several blocks
    return Extras(
        references=tuple(_lines(latent, count, part) for latent in extras.references),
        places=extras.places,
        mask=_lines_or_none(extras.mask, count, part),
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
    a, b = one.conditioning, other.conditioning
    return a.context.shape[1:] == b.context.shape[1:] and (a.guidance is None) == (b.guidance is None)


def _joined(one: Rows, other: Rows) -> Rows:
    """Two of the same form."""
    a, b = one.conditioning, other.conditioning
    guidance = None
    if a.guidance is not None and b.guidance is not None:
        guidance = torch.cat([a.guidance, b.guidance])
    prompt = Conditioning(torch.cat([a.context, b.context]), torch.cat([a.pooled, b.pooled]), guidance)
    return Rows(torch.cat([one.x, other.x]), torch.cat([one.sigma, other.sigma]), prompt)
