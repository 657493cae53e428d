"""A sampling job as it stands outside the ranks, so that it goes on where it was when they crash."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from torch import Tensor

from ..errors import RankFailed, TransportError
from ..requests import RunInfo, SampleRequest, SamplerState
from ..trials import NO_TRIALS, Trial, TrialPlan
from ..wire.payloads import Tensors, sample_tensors, state_tensors, take_state
from ..wire.protocol import Progress

OnStep = Callable[[int, int, Tensor | None], None]


class SamplingJob:
    """One request, and the last state that its sampler sent.

    The state lives no longer than its request, so of what it belongs to only the weights' file can change: then the job
    begins again. `trials`: that it still makes; after a failure, which may be a trial's own, it makes none.
    """

    def __init__(self, request: SampleRequest, on_step: OnStep | None, trials: TrialPlan = NO_TRIALS) -> None:
        self.request = request
        self.trials = trials
        self._given_up: tuple[Trial, ...] = ()
        self._tensors = sample_tensors(request)
        self._on_step = on_step
        self._weights: object = None
        self._state: SamplerState | None = None
        self._seconds: dict[int, float] = {}  # of each step, 1-based
        self._first = 0  # steps that the ranks did not have to run again
        self._notes: tuple[str, ...] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the latent."""
        return tuple(self._tensors["latent"].shape)

    def begin(self, weights: object) -> Tensors:
        """The payload for ranks that hold `weights`, anything that says which these are."""
        if weights != self._weights:
            self._state, self._weights = None, weights
        if self._state is None:
            self._first = 0
            return self._tensors
        self._first = self._state.step
        return self._tensors | state_tensors(self._state)

    def take(self, message: Progress, tensors: Tensors | None) -> None:
        """Rank 0's word on a step."""
        tensors = dict(tensors or {})
        state = take_state(tensors)
        if state is not None and tuple(state.x.shape) != self.shape:
            raise TransportError(f"rank 0 sent a state of shape {list(state.x.shape)}")
        self._state = state or self._state
        self._seconds[message.step] = message.seconds
        if self._on_step is not None:
            self._on_step(message.step, message.steps, tensors.get("denoised"))

    def survive(self, error: RankFailed, device: str | None) -> str:
        """Says what happens now that the ranks failed, here and in the result's notes."""
        self.give_up_trials()
        cause = error.cause.split("\n", 1)[0]
        goes_on = "begins again" if self._state is None else f"goes on after step {self._state.step}"
        text = f"{error.who(device)} failed ({cause}); the job {goes_on} on ranks started anew"
        self._notes += (text,)
        return text

    def give_up_trials(self) -> bool:
        """Whether there were any to give up."""
        if not self.trials:
            return False
        self._given_up = tuple(Trial(strategy) for strategy in self.trials.strategies)
        self.trials = NO_TRIALS
        self._notes += ("no other strategies were tried after that",)
        return True

    def merged(self, info: RunInfo) -> RunInfo:
        """The record of the whole job, of which `info` is the part after the last crash."""
        earlier = tuple(self._seconds.get(step, 0.0) for step in range(1, self._first + 1))
        notes = self._notes
        if self._first and info.strategy.pipefusion_degree > 1 and not info.exact:
            notes += ("PipeFusion warmed up again after that, so this is another approximation",)
        if self._first and info.reused_calls:
            notes += ("the step cache was empty again after that, so this is another approximation",)
        return replace(
            info,
            step_seconds=earlier + info.step_seconds,
            notes=info.notes + notes,
            trials=info.trials or self._given_up,
        )
