"""Requests for a tiny Flux: the cases of the parity tests, and one plain job."""

from __future__ import annotations

from dataclasses import replace

import torch

from parallel_backend.requests import Conditioning, SampleRequest

BLOCKS, CONTEXT, POOLED = 1, 64, 32
TOLERANCE = 1e-5
# Latent (height, width): tokens divide by 4; tokens do not divide (35); both sides odd.
SIZES = {"dividing": (8, 16), "not dividing": (10, 14), "odd sides": (9, 13)}
# (size, cfg, batch)
_PAIRS = (
    ("dividing", 1.0, 1),
    ("not dividing", 1.0, 3),
    ("not dividing", 4.0, 1),
    ("odd sides", 1.0, 1),
    ("odd sides", 4.0, 3),
)


def prompt(seed, tokens):
    generator = torch.Generator().manual_seed(seed)
    return Conditioning(
        context=torch.randn(1, tokens, CONTEXT, generator=generator),
        pooled=torch.randn(1, POOLED, generator=generator),
        guidance=torch.tensor([3.5]),
    )


def request(size, cfg, batch, positive_tokens=7, negative_tokens=7, steps=3):
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(batch, 16, *size, generator=generator)
    return SampleRequest(
        noise=noise,
        sigmas=torch.linspace(0.95, 0, steps + 1),
        positive=prompt(1, positive_tokens),
        negative=prompt(2, negative_tokens) if cfg != 1.0 else None,
        cfg=cfg,
    )


CASES = {
    **{
        f"{name}, cfg {cfg:g}, batch {batch}": request(SIZES[name], cfg, batch) for name, cfg, batch in _PAIRS
    },
    "text lengths differ": request(SIZES["odd sides"], 4.0, 2, positive_tokens=8, negative_tokens=5),
    "fewer text tokens than ranks": request(SIZES["dividing"], 1.0, 1, positive_tokens=1),
    "fewer image tokens than ranks": request((2, 2), 1.0, 1),
}
# For strategies that are exact at every step: two steps show as much as more, since the second starts from the first.
CASES_OF_TWO_STEPS = {name: replace(case, sigmas=torch.linspace(0.95, 0, 3)) for name, case in CASES.items()}


def flux_request():
    """Returns a request of four steps for a latent with odd sides."""
    return request((9, 11), cfg=1.0, batch=1, steps=4)
