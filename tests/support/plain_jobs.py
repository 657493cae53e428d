"""Plain jobs on a test's ranks: the work of a plain `RunJob` message, without the messages.

The forward is diffusers' Flux.1, or one with known maths.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import torch

from parallel_backend.engine.load import load_under
from parallel_backend.engine.module_forward import make_module_forward
from parallel_backend.models.diffusers import load as _load_flux  # noqa: F401  # once, before ranks are forked
from parallel_backend.rank.work.plain_job import PlainJob
from parallel_backend.requests import Conditioning, ModelSpec, Placement, SampleRequest


class CachedForward:
    """A forward whose calls a step cache may answer."""

    def __init__(self, forward, cache):
        self._forward, self._cache = forward, cache

    def __call__(self, call):
        return self._forward(call, self._cache)

    def __getattr__(self, name):
        return getattr(self._forward, name)


def run_plain(forward, request, boundary=None):
    """Runs a job with this forward and returns the latent."""
    return PlainJob(forward, request).run(boundary or Boundary())


class PlainJobs:
    """Runs jobs of model files, one after the other, under different strategies."""

    def __init__(self, layouts, weight_dtype="auto"):
        self._layouts, self._dtype, self._loaded, self._forwards = layouts, weight_dtype, {}, {}

    def forward(self, path, placement, cache=None):
        """Returns the forward of the file's model under `placement`. Models and forwards are cached."""
        key = path, placement.strategy.weights
        if key not in self._loaded:
            spec = ModelSpec(path, weight_dtype=self._dtype)
            self._loaded[key] = load_under(spec, self._layouts, placement.strategy)
        if (path, placement) not in self._forwards:
            forward = make_module_forward(self._loaded[key], self._layouts, placement)
            self._forwards[path, placement] = forward
        forward = self._forwards[path, placement]
        return forward if cache is None else CachedForward(forward, cache)

    def run(self, path, strategy, request, engine="auto", boundary=None, cache=None):
        """Runs a job and returns (latent, the forward, bytes that this rank sent)."""
        forward = self.forward(path, Placement(strategy, engine), cache)
        before = forward.bytes_sent
        latent = run_plain(forward, request, boundary)
        return latent, forward, forward.bytes_sent - before


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
