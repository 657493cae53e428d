"""The answers of a job's model calls: recorded, and played back by ranks that go on where others failed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...requests import LoopState
from .step_boundary import StepBoundary

MAX_ANSWER_BYTES = 2**30  # of answers that ComfyUI's process keeps of a job, for the case that ranks crash


class Answers:
    """The answers of one job on one rank. `state`: what the calls before a failure gave; None for a job that begins."""

    def __init__(self, on_step: StepBoundary, state: LoopState | None) -> None:
        self._earlier = () if state is None else tuple(state.answers)
        self.steps_done = 0 if state is None else state.step
        self._on_step = on_step
        self._records = on_step.progress.sends_states
        self._first = len(self._earlier)
        self._new: list[Tensor] = []
        self._bytes = sum(one.nbytes for one in self._earlier)

    def recorded(self, number: int, latent: Any) -> Tensor | None:
        """What the call of this number, from 1, gave before; None if it has to be made."""
        if number > len(self._earlier):
            return None
        return self._earlier[number - 1][0].to(latent.device, latent.dtype, copy=True)

    def add(self, answer: Any, *, is_all: bool) -> None:
        """`is_all`: the call leaves nothing else behind, so another process may go on from its answer."""
        if not self._records:
            return
        fits = is_all and isinstance(answer, Tensor) and self._bytes + answer.numel() * 4 <= MAX_ANSWER_BYTES
        if fits and self._new and self._new[0].shape[1:] != answer.shape:
            fits = False
        if not fits:
            self.stop()
            return
        self._new.append(answer.float().unsqueeze(0))
        self._bytes += self._new[-1].nbytes

    def stop(self) -> None:
        """Records nothing more: a job that fails begins again where the record ends."""
        self._records, self._new = False, []

    def step_ended(self, step: int) -> None:
        """Has the coming step boundary send the answers of this step."""
        if self._records and self._new:
            self._on_step.progress.keep(lambda: self._take(step))

    def _take(self, step: int) -> LoopState:
        new, self._new = self._new, []
        state = LoopState(step, self._first, torch.stack(new))
        self._first += len(new)
        return state
