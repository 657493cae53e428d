"""A sampler that runs patch by patch: each patch of the latent takes a step as soon as it is denoised."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import InitVar, dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from .image_patches import ElementPatches
from .samplers import History, Sigmas, Step


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
class _Patch:
    """One patch between two model calls. `wish`: (x, sigma) to denoise next, None after the last step."""

    _step: Callable[..., Step]
    x: Tensor
    _sigmas: Sigmas
    steps_done: int
    _history: PatchHistory
    wish: tuple[Tensor, Tensor] | None = None

    def __post_init__(self) -> None:
        self.denoised = self.x
        self._begin()

    def _begin(self) -> None:
        self._running = self._step(self.x, self._sigmas, self.steps_done, self._history)
        self.wish = next(self._running)

    def answer(self, denoised: Tensor) -> bool:
        """Continues with the denoised patch; returns True if that ended a step."""
        try:
            self.wish = self._running.send(denoised)
            return False
        except StopIteration as end:
            self.x, self.denoised = end.value
        self.steps_done += 1
        self.wish = None
        if self.steps_done < len(self._sigmas) - 1:
            self._begin()
        return True


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

    def __post_init__(self, x: Tensor) -> None:
        past = self._history.denoised
        self._start_latent = self._patches.pack(x)
        self._noise = SharedNoise(self._history, x, self._patches)
        self._past = None if past is None else self._patches.pack(past)
        self._states: dict[int, _Patch] = {}

    @property
    def latent(self) -> Tensor:
        """The latent [B, …] after the last step."""
        return self._joined([patch.x for patch in self._in_order()])

    def enter(self, patch: slice) -> Tensor:
        """Returns the input of a patch's next model call, [B, elements]."""
        state = self._states.get(patch.start) or self._start(patch)
        assert state.wish is not None, "it has ended"
        return state.wish[0]

    def leave(self, patch: slice, denoised: Tensor) -> None:
        """Takes the denoised patch that this model call gave, [B, elements]."""
        state = self._states[patch.start]
        if state.answer(denoised) and patch.stop == self._start_latent.shape[1]:
            found = [each.denoised for each in self._in_order()]
            self._on_step.passed(state.steps_done - 1, self._joined(found))

    def _start(self, patch: slice) -> _Patch:
        past = None if self._past is None else self._past[:, patch]
        history = PatchHistory(self._history.generator, past, self._noise, patch)
        state = _Patch(self._step, self._start_latent[:, patch], self._sigmas, self._first, history)
        self._states[patch.start] = state
        return state

    def _in_order(self) -> list[_Patch]:
        return [self._states[start] for start in sorted(self._states)]

    def _joined(self, parts: list[Tensor]) -> Tensor:
        """Returns the latent [B, …] made of the elements of all patches."""
        return self._patches.unpack(torch.cat(parts, dim=1))
