"""A sampler that runs patch by patch: each patch of the latent takes a step as soon as it is denoised."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator
from dataclasses import InitVar, dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from .image_patches import ElementPatches
from .samplers import History, Sigmas, Step

# The steps of a patch: a Step after the other, see samplers.py.
PatchRun = Generator[tuple[Tensor, Tensor], Tensor, None]


class OnPatchStep(Protocol):
    """The boundary between two steps of flowing patches."""

    def passed(self, i: int, denoised: Tensor) -> None:
        """Reports that step i (0-based) is done, on ranks where samplers run; never raises."""

    def is_stopped(self, lag: int) -> bool:
        """Returns True if the request was cancelled, as known `lag` calls ago; the same on all ranks."""


@dataclass(eq=False)
class SharedNoise:
    """The noise that all patches of a run share: drawn in the latent's shape, as if it were sampled whole."""

    _history: History
    _like: Tensor
    _patches: ElementPatches
    _draws: dict[int, Tensor] = field(default_factory=dict)

    def draw(self, number: int) -> Tensor:
        """Returns draw `number` of this run, [B, elements]. Patches take turns, so only the last two draws are kept."""
        while number not in self._draws:
            following = max(self._draws, default=-1) + 1
            self._draws[following] = self._patches.pack(self._history.noise_like(self._like))
            self._draws.pop(following - 2, None)
        return self._draws[number]


class PatchHistory(History):
    """A sampler's memory of one patch from step to step; its noise is the patch's part of the shared noise."""

    def __init__(
        self, generator: torch.Generator, denoised: Tensor | None, noise: SharedNoise, patch: slice
    ) -> None:
        super().__init__(generator, denoised)
        self._noise, self._patch, self._drawn = noise, patch, 0

    def noise_like(self, x: Tensor) -> Tensor:
        self._drawn += 1
        return self._noise.draw(self._drawn - 1)[:, self._patch]


@dataclass(eq=False)
class PatchSampling:
    """A run over `x` [B, …] from step `first` on, driven by rank/pipefusion/patch_flow.py. A patch is named by its
    slice in the elements that `patches` packs."""

    _step: Callable[..., Step]
    x: InitVar[Tensor]
    _sigmas: Sigmas
    _first: int
    _history: History
    _on_step: OnPatchStep
    _patches: ElementPatches
    _runs: dict[int, PatchRun] = field(default_factory=dict)
    _inputs: dict[int, Tensor] = field(default_factory=dict)

    def __post_init__(self, x: Tensor) -> None:
        past = self._history.denoised
        self._past = None if past is None else self._patches.pack(past)
        self._noise = SharedNoise(self._history, x, self._patches)
        # Of all patches, [B, elements]: after the last step of each.
        self._x = self._patches.pack(x)
        self._denoised = torch.empty_like(self._x)

    @property
    def latent(self) -> Tensor:
        """The latent [B, …] after the last step."""
        return self._patches.unpack(self._x)

    def enter(self, patch: slice) -> Tensor:
        """Returns the input of a patch's next model call, [B, elements]."""
        if patch.start not in self._runs:
            self._runs[patch.start] = self._take_steps(patch)
            self._inputs[patch.start], _ = next(self._runs[patch.start])
        return self._inputs[patch.start]

    def leave(self, patch: slice, denoised: Tensor) -> None:
        """Takes the denoised patch that this model call gave, [B, elements]."""
        with contextlib.suppress(StopIteration):  # that was its last call
            self._inputs[patch.start], _ = self._runs[patch.start].send(denoised)

    def _take_steps(self, patch: slice) -> PatchRun:
        """Takes all steps of one patch."""
        past = None if self._past is None else self._past[:, patch]
        history = PatchHistory(self._history.generator, past, self._noise, patch)
        x = self._x[:, patch]
        for i in range(self._first, len(self._sigmas) - 1):
            x, denoised = yield from self._step(x, self._sigmas, i, history)
            self._x[:, patch], self._denoised[:, patch] = x, denoised
            if patch.stop == self._x.shape[1]:  # the last patch of the step
                self._on_step.passed(i, self._patches.unpack(self._denoised))
