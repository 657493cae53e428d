"""A sampler that runs patch by patch: each patch of the latent takes its steps as soon as its velocity is there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..models.flux.packing import pack, unpack
from ..requests import SamplerState
from .guidance import Guidance
from .samplers import History, Step


class SharedNoise:
    """The noise that all patches of a run draw from, in the latent's own shape as if it were sampled whole."""

    def __init__(self, history: History, like: Tensor) -> None:
        self._history = history
        self._like = like
        self._draws: dict[int, Tensor] = {}

    def tokens(self, number: int) -> Tensor:
        """Draw `number` of this run, [B, N, 64]. Patches ask in turns: an older draw than the last two is not kept."""
        while number not in self._draws:
            following = max(self._draws, default=-1) + 1
            self._draws[following] = pack(self._history.noise_like(self._like))
            self._draws.pop(following - 2, None)
        return self._draws[number]


@dataclass
class PatchHistory(History):
    """What a sampler carries from step to step of one patch."""

    noise: SharedNoise | None = None
    patch: slice | None = None
    drawn: int = 0

    def noise_like(self, x: Tensor) -> Tensor:
        self.drawn += 1
        return self.noise.tokens(self.drawn - 1)[:, self.patch]


class _Patch:
    """One patch between two model calls: `wish` is what its sampler wants denoised next, None when it has ended."""

    def __init__(
        self, step: Callable[..., Step], x: Tensor, sigmas: Tensor, first: int, history: PatchHistory
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
    def past(self) -> Tensor | None:
        """What the sampler keeps of the step before the next one."""
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

    def state(self, step: int, size: tuple[int, int]) -> SamplerState:
        whole = unpack(torch.cat(self.x, dim=1), *size)
        denoised = None if self.denoised[0] is None else unpack(torch.cat(self.denoised, dim=1), *size)
        return SamplerState(step, whole, denoised, self._generator, exact=False)


class PatchSampling:
    """Samples `x` [B, C, h, w] from step `first` on, as engine/patch_flow.py asks for it.

    The order of the tokens' elements is Flux's packing, which the samplers do not mind: they work element by element.
    """

    def __init__(
        self,
        step: Callable[..., Step],
        x: Tensor,
        sigmas: Tensor,
        first: int,
        history: History,
        guidance: Guidance,
        on_step,
        *,
        lag: int,
        keep: Callable[[Callable[[], SamplerState]], None] | None = None,
    ) -> None:
        self._size = x.shape[-2:]
        self._inputs = pack(x)  # of each patch what its last model call saw, or will see first
        self._step = step
        self._sigmas = sigmas
        self._first = first
        self._noise = SharedNoise(history, x)
        self._past = None if history.denoised is None else pack(history.denoised)
        self._guidance = guidance.part(pack)
        self._on_step = on_step
        self._lag = lag
        self._keep = keep
        self._generator = history.generator
        self._ended: dict[
            int, _Ended
        ] = {}  # by steps done, those that some patches have ended and others not
        self._patches: dict[int, _Patch] = {}

    @property
    def latent(self) -> Tensor:
        """[B, C, h, w] after the last step."""
        return self._together("x")

    def enter(self, patch: slice) -> Tensor:
        state = self._patches.get(patch.start) or self._start(patch)
        x, sigma = state.wish
        self._inputs[:, patch] = self._part(patch).model_input(x, sigma)
        if any(side % 2 for side in self._size):
            # Odd sides are padded with the opposite edge, which earlier patches have brought up to date.
            self._inputs = pack(unpack(self._inputs, *self._size))
        return self._inputs[:, patch]

    def leave(self, patch: slice, velocities: list[Tensor]) -> None:
        state = self._patches[patch.start]
        _, sigma = state.wish
        ended = state.answer(self._part(patch).denoised(self._inputs[:, patch], sigma, velocities))
        if ended and self._keep is not None:
            self._note_end(state, patch)
        if ended and patch.stop == self._inputs.shape[1]:
            self._on_step.passed(state.steps_done - 1, self._together("denoised"))

    def _note_end(self, state: _Patch, patch: slice) -> None:
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
            self._keep(lambda: ended.state(step, self._size))

    def is_stopped(self) -> bool:
        return self._on_step.is_stopped(self._lag)

    def _start(self, patch: slice) -> _Patch:
        past = None if self._past is None else self._past[:, patch]
        history = PatchHistory(None, past, noise=self._noise, patch=patch)
        # Its own copy: model inputs are written where the latent was.
        state = _Patch(self._step, self._inputs[:, patch].clone(), self._sigmas, self._first, history)
        self._patches[patch.start] = state
        return state

    def _part(self, patch: slice) -> Guidance:
        return self._guidance.part(lambda tokens: tokens[:, patch])

    def _together(self, name: str) -> Tensor:
        parts = [getattr(self._patches[start], name) for start in sorted(self._patches)]
        return unpack(torch.cat(parts, dim=1), *self._size)
