"""Records the answers of a job's model calls; ranks that resume a failed job replay them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...requests import LoopState
from .step_boundary import StepBoundary

MAX_ANSWER_BYTES = 2**30  # of a job's answers that ComfyUI's process stores, in case ranks crash


class Answers:
    """The answers of one job on one rank. `state`: those of the calls before a failure; None for a new job."""

    def __init__(self, on_step: StepBoundary, state: LoopState | None) -> None:
        self._earlier = () if state is None else tuple(state.answers)
        self.steps_done = 0 if state is None else state.step
        self._on_step = on_step
        self._records = on_step.progress.is_first
        self._first = len(self._earlier)
        self._new: list[Tensor] = []
        self._bytes = sum(one.nbytes for one in self._earlier)

    def recorded(self, number: int, latent: Any) -> Tensor | None:
        """Returns the recorded answer of call `number`, from 1; None if the call has to be made."""
        if number > len(self._earlier):
            return None
        return self._earlier[number - 1][0].to(latent.device, latent.dtype, copy=True)

    def add(self, answer: Any, *, is_all: bool) -> None:
        """Records an answer. `is_all`: True if the call changes nothing else, so a new process can replay it."""
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
        """Stops recording. A job that fails later resumes where the record ends."""
        self._records, self._new = False, []

    def step_ended(self, step: int) -> None:
        """Makes the coming step boundary send the answers that were not sent yet."""
        if self._records and self._new:
            self._on_step.progress.keep(lambda: self._take(step))

    def _take(self, step: int) -> LoopState:
        new, self._new = self._new, []
        state = LoopState(step, self._first, torch.stack(new))
        self._first += len(new)
        return state
