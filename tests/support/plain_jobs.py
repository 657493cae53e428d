"""Plain jobs with diffusers' Flux.1 on a test's ranks: the work of a plain `RunJob` message, without the messages."""

from __future__ import annotations

from parallel_backend.engine.load import load_under
from parallel_backend.engine.module_forward import make_module_forward
from parallel_backend.models.diffusers import load as _load_flux  # noqa: F401  # once, before ranks are forked
from parallel_backend.rank.work.plain_job import PlainJob
from parallel_backend.requests import ModelSpec, Placement
from point_forward import Boundary


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
