"""A sampler that runs patch by patch: each patch of the latent takes its steps as soon as its velocity is there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from ..requests import SamplerState
from .samplers import History, Sigmas, Step


class Packing(Protocol):
    """A model's tokens as places of a latent's elements. Samplers do not mind where: they work element by element."""

    def pack(self, latent: Tensor) -> Tensor:
        """[B, C, h, w] -> [B, N, channels], filled up where a token reaches beyond the latent."""

    def unpack(self, tokens: Tensor, height: int, width: int) -> Tensor:
        """[B, N, channels] -> [B, C, h, w]"""


class PatchGuidance(Protocol):
    """What is denoised from what the model gives, element by element (guidance.Guidance)."""

    def part(self, of: Callable[[Tensor], Tensor]) -> PatchGuidance:
        """The same for `of(tensor)` of each tensor."""

    def model_input(self, x: Tensor, sigma: Tensor) -> Tensor: ...

    def denoised(self, x: Tensor, sigma: Tensor, velocities: list[Tensor]) -> Tensor:
        """`velocities`: what the model made of x for each prompt."""


@runtime_checkable
class OnPatchStep(Protocol):
    """The boundary between two steps of flowing patches."""

    def passed(self, i: int, denoised: Tensor) -> None:
        """After step i (0-based), on ranks where samplers run; never raises."""

    def is_stopped(self, lag: int) -> bool:
        """Whether the request was cancelled, as known `lag` questions ago; the same on all ranks."""


class SharedNoise:
    """The noise that all patches of a run draw from, in the latent's own shape as if it were sampled whole."""

    def __init__(self, history: History, like: Tensor, packing: Packing) -> None:
        self._history = history
        self._like = like
        self._packing = packing
        self._draws: dict[int, Tensor] = {}

    def tokens(self, number: int) -> Tensor:
        """Draw `number` of this run, [B, N, channels]. Patches ask in turns: only the last two draws are kept."""
        while number not in self._draws:
            following = max(self._draws, default=-1) + 1
            self._draws[following] = self._packing.pack(self._history.noise_like(self._like))
            self._draws.pop(following - 2, None)
        return self._draws[number]


class PatchHistory(History):
    """A sampler's memory of one patch from step to step: its noise is its part of what all patches draw together."""

    def __init__(
        self, generator: torch.Generator, denoised: Tensor | None, noise: SharedNoise, patch: slice
    ) -> None:
        super().__init__(generator, denoised)
        self._noise, self._patch, self._drawn = noise, patch, 0

    def noise_like(self, x: Tensor) -> Tensor:
        self._drawn += 1
        return self._noise.tokens(self._drawn - 1)[:, self._patch]


class _Patch:
    """One patch between two model calls: `wish` is what its sampler wants denoised next, None when it has ended."""

    def __init__(
        self, step: Callable[..., Step], x: Tensor, sigmas: Sigmas, first: int, history: PatchHistory
    ) -> None:
        self._step = step
        self._sigmas = sigmas
        self._history = history
        self.steps_done = first
        self.x = x
        self.denoised = x
        self.wish: tuple[Tensor, Tensor] | None = None
        self._begin()

    def _begin(self) -> None:
        self._running = self._step(self.x, self._sigmas, self.steps_done, self._history)
        self.wish = next(self._running)

    @property
    def wanted(self) -> tuple[Tensor, Tensor]:
        """(x, sigma) of its next model call."""
        assert self.wish is not None, "it has ended"
        return self.wish

    @property
    def past(self) -> Tensor | None:
        """The denoised patch of the step before the next one, where the sampler keeps it."""
        return self._history.denoised

    def answer(self, denoised: Tensor) -> bool:
        """Goes on with the denoised patch; whether that ended a step."""
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


class _Ended:
    """The patches that have ended one step, in order. `generator`: the state of the source of noise by then."""

    def __init__(self, generator: Tensor) -> None:
        self._generator = generator
        self.x: list[Tensor] = []
        self.denoised: list[Tensor | None] = []

    def state(self, step: int, together: Callable[[list[Tensor]], Tensor]) -> SamplerState:
        denoised = [part for part in self.denoised if part is not None]
        past = together(denoised) if denoised else None
        return SamplerState(step, together(self.x), past, self._generator, exact=False)


class PatchSampling:
    """Samples `x` [B, C, h, w] from step `first` on, as rank/pipefusion/patch_flow.py asks for it."""

    def __init__(
        self,
        step: Callable[..., Step],
        x: Tensor,
        sigmas: Sigmas,
        first: int,
        history: History,
        guidance: PatchGuidance,
        on_step: OnPatchStep,
        packing: Packing,
        *,
        lag: int,
        keep: Callable[[Callable[[], SamplerState]], None] | None = None,
    ) -> None:
        self._packing = packing
        self._height, self._width = x.shape[-2:]
        self._inputs = packing.pack(x)  # of each patch what its last model call saw, or will see first
        self._is_filled_up = self._inputs.numel() > x.numel()
        self._step = step
        self._sigmas = sigmas
        self._first = first
        self._noise = SharedNoise(history, x, packing)
        self._past = None if history.denoised is None else packing.pack(history.denoised)
        self._guidance = guidance.part(packing.pack)
        self._on_step = on_step
        self._lag = lag
        self._keep = keep
        self._generator = history.generator
        # By steps done, those that some patches have ended and others not.
        self._ended: dict[int, _Ended] = {}
        self._patches: dict[int, _Patch] = {}

    @property
    def latent(self) -> Tensor:
        """[B, C, h, w] after the last step."""
        return self._together([patch.x for patch in self._in_order()])

    def enter(self, patch: slice) -> Tensor:
        state = self._patches.get(patch.start) or self._start(patch)
        x, sigma = state.wanted
        self._inputs[:, patch] = self._part(patch).model_input(x, sigma)
        if self._is_filled_up:
            # Tokens that reach beyond the latent hold parts of it again, which earlier patches brought up to date.
            self._inputs = self._packing.pack(self._unpacked(self._inputs))
        return self._inputs[:, patch]

    def leave(self, patch: slice, velocities: list[Tensor]) -> None:
        state = self._patches[patch.start]
        _, sigma = state.wanted
        ended = state.answer(self._part(patch).denoised(self._inputs[:, patch], sigma, velocities))
        if ended and self._keep is not None:
            self._note_end(state, patch, self._keep)
        if ended and patch.stop == self._inputs.shape[1]:
            denoised = [each.denoised for each in self._in_order()]
            self._on_step.passed(state.steps_done - 1, self._together(denoised))

    def _note_end(
        self, state: _Patch, patch: slice, keep: Callable[[Callable[[], SamplerState]], None]
    ) -> None:
        """Patches that lead are a step ahead, so a step's latent is put together from what each had at its end."""
        step = state.steps_done
        if step not in self._ended:  # the leader: the noise of this step is drawn, and none of the next
            self._ended[step] = _Ended(self._generator.get_state())
        ended = self._ended[step]
        ended.x.append(state.x)
        ended.denoised.append(state.past)
        if patch.stop < self._inputs.shape[1]:
            return
        del self._ended[step]
        if step < len(self._sigmas) - 1:
            keep(lambda: ended.state(step, self._together))

    def is_stopped(self) -> bool:
        return self._on_step.is_stopped(self._lag)

    def _start(self, patch: slice) -> _Patch:
        past = None if self._past is None else self._past[:, patch]
        history = PatchHistory(self._generator, past, self._noise, patch)
        # Its own copy: model inputs are written where the latent was.
        state = _Patch(self._step, self._inputs[:, patch].clone(), self._sigmas, self._first, history)
        self._patches[patch.start] = state
        return state

    def _part(self, patch: slice) -> PatchGuidance:
        return self._guidance.part(lambda tokens: tokens[:, patch])

    def _in_order(self) -> list[_Patch]:
        return [self._patches[start] for start in sorted(self._patches)]

    def _together(self, parts: list[Tensor]) -> Tensor:
        """The latent [B, C, h, w] of the tokens of all patches."""
        return self._unpacked(torch.cat(parts, dim=1))

    def _unpacked(self, tokens: Tensor) -> Tensor:
        return self._packing.unpack(tokens, self._height, self._width)
