"""A forward with known maths, a request for it, and a boundary that records the steps of a plain job's loop."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import torch

from parallel_backend.requests import Conditioning, SampleRequest


class PointForward:
    """A perfect flow model with the interface of ModuleForward. A prompt's context holds the latent value to which it
    leads. `calls`: number of rows of each call."""

    stages = None
    model = SimpleNamespace(module=None, device=torch.device("cpu"))

    def __init__(self):
        self.calls = []

    def __call__(self, call):
        x, sigma = call.args
        self.calls.append(call.rows)
        return (x - call.kwargs["context"].view(-1, 1, 1, 1)) / sigma.view(-1, 1, 1, 1)


def point_prompt(value):
    return Conditioning(
        context=torch.tensor([[[value]]]), pooled=torch.zeros(1, 1), guidance=torch.tensor([3.5])
    )


def point_request(**changes):
    generator = torch.Generator().manual_seed(0)
    request = SampleRequest(
        noise=torch.randn(2, 4, 3, 5, generator=generator),
        sigmas=torch.linspace(1, 0, 5),
        positive=point_prompt(2.0),
        negative=None,
        cfg=1.0,
    )
    return replace(request, **changes)


class Boundary:
    """A boundary that records steps. `stop_at`: `is_stopped` returns True after this many calls; None: never."""

    def __init__(self, stop_at=None):
        self.steps, self.asked, self.stop_at = [], 0, stop_at

    def __call__(self, i, denoised):
        self.steps.append(i)

    passed = __call__

    def is_stopped(self, lag):
        self.asked += 1
        return self.stop_at is not None and self.asked > self.stop_at
