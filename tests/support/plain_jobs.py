"""Plain jobs over diffusers' Flux.1 on the ranks of a test: what `Sample` runs, without its messages."""

from __future__ import annotations

from parallel_backend.engine.load import load_under
from parallel_backend.engine.module_forward import make_module_forward
from parallel_backend.rank.work.plain_forward import PlainForward
from parallel_backend.requests import ModelSpec, Placement
from parallel_backend.sampling.denoise import denoise
from point_forward import Boundary


class CachedForward:
    """A forward whose calls a step cache may answer."""

    def __init__(self, forward, cache):
        self._forward, self._cache = forward, cache

    def __call__(self, call):
        return self._forward(call, self._cache)

    def __getattr__(self, name):
        return getattr(self._forward, name)


class PlainSubject(PlainForward):
    """The calls of plain jobs by one forward. `ran`: that forward."""

    def __init__(self, model, layouts, placement, cache=None):
        self.ran = make_module_forward(model, layouts, placement)
        super().__init__(self.ran if cache is None else CachedForward(self.ran, cache))


class PlainJobs:
    """Runs jobs of model files under one strategy after the other."""

    def __init__(self, layouts, weight_dtype="auto"):
        self._layouts, self._dtype, self._loaded, self._subjects = layouts, weight_dtype, {}, {}

    def subject(self, path, placement, cache=None):
        """The file's model under `placement`; without a cache it is kept."""
        key = path, placement.strategy.weights
        if key not in self._loaded:
            spec = ModelSpec(path, weight_dtype=self._dtype)
            self._loaded[key] = load_under(spec, self._layouts, placement.strategy)
        if cache is not None:
            return PlainSubject(self._loaded[key], self._layouts, placement, cache)
        if (path, placement) not in self._subjects:
            self._subjects[path, placement] = PlainSubject(self._loaded[key], self._layouts, placement)
        return self._subjects[path, placement]

    def run(self, path, strategy, request, engine="auto", boundary=None, cache=None):
        """(latent, the forward, bytes sent)"""
        subject = self.subject(path, Placement(strategy, engine), cache)
        before = subject.ran.bytes_sent
        latent = denoise(subject, request, boundary or Boundary())
        return latent, subject.ran, subject.ran.bytes_sent - before
