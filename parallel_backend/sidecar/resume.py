"""The state of a sampling job, kept outside the ranks so that it can resume where it was after they crash."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..errors import RankFailed
from ..job.payload import STEP
from ..requests import LoopState, Placement, RunInfo, SampleRequest
from ..trials import NO_TRIALS, Trial, TrialPlan
from ..wire.payloads import Tensors, sample_tensors, state_tensors, take_state, within_limit
from ..wire.protocol import Progress, RunJob

OnStep = Callable[[int, int, Tensor | None], None]
_BESIDE = " beside its model (other models that its nodes use, prompts, latents)"
_REMEDY = (
    "Load the other models from .safetensors files in the dtype that they have there, so that the devices can read "
    "them; or take their nodes out"
)


@dataclass(frozen=True)
class ShippedRequest:
    """A job of ComfyUI's objects. `noise`: has the shape of its latent; `tensors(holdings)`: returns its payload for
    the ranks of these RankHoldings, without what they were sent before; `is_call`: True for one call of the
    network, whose answer may have another shape, or several parts; `imports()`: names the packs that the ranks import
    first; `trials`: strategies that it tries on its way. Each is exact and needs the same weights as the placement, on
    all ranks or on the first one; `cfg`: of a plain job, which has no objects of ComfyUI's; None for any other;
    `on_latents`: gets the tensors of each step (payload.pack_step) of a job that sends them."""

    noise: Tensor
    steps: int
    tensors: Callable[[object], Tensors]
    cache_threshold: float = 0.0
    is_call: bool = False
    imports: Callable[[], str] = str
    trials: TrialPlan = NO_TRIALS
    cfg: float | None = None
    on_latents: Callable[[Tensors], None] | None = None

    @classmethod
    def of(cls, plain: SampleRequest) -> ShippedRequest:
        """Returns a plain job in this form."""
        return cls(plain.noise, len(plain.sigmas) - 1, lambda _: sample_tensors(plain), cfg=float(plain.cfg))


class ResumableJob:
    """One request and its progress so far; a plain one begins again after a crash.

    The record lives no longer than its request, whose weights file stays the same (Lease.file). `trials`: those still
    to be made; none after a failure, which a trial may have caused.
    """

    def __init__(self, request: ShippedRequest, on_step: OnStep | None) -> None:
        self.request, self.trials = request, request.trials
        self._given_up: tuple[Trial, ...] = ()
        self._on_step = on_step
        self._step = 0  # the last step whose answers are recorded
        # The answers to model calls of ComfyUI's loop so far, sent by rank 0 in parts.
        self._answers: list[Tensor] = []
        self._seconds: dict[int, float] = {}  # of each step, 1-based
        self._first = 0  # steps that the ranks did not have to run again
        self._repeats = 0  # the step that ranks had reached before they crashed: earlier ones come again
        self._notes: tuple[str, ...] = ()

    def message(self, placement: Placement, model: int) -> RunJob:
        """Returns the message that requests the job; its tensors are sent with it."""
        previews, request = self._on_step is not None, self.request
        return RunJob(placement, request.steps, previews, model, self.trials, request.cfg)

    def begin(self, holdings: object = None) -> Tensors:
        """Returns the payload for ranks that hold the job's model. `holdings`: their RankHoldings, see ShippedRequest.
        Raises RequestError if it is too large to send."""
        tensors = within_limit(self.request.tensors(holdings), "The job has", _REMEDY, _BESIDE)
        self._first = self._step
        if not self._first:
            return tensors
        self._answers = [torch.cat(self._answers)]
        return tensors | state_tensors(LoopState(self._step, 0, self._answers[0]))

    def take(self, message: Progress, tensors: Tensors | None) -> None:
        """Records rank 0's report on a step and calls `on_step`."""
        tensors = dict(tensors or {})
        state = take_state(tensors)
        # The record stops growing if a part is lost.
        if state is not None and state.first == sum(map(len, self._answers)):
            self._step = state.step
            self._answers.append(state.answers)
        if self.request.on_latents is not None and STEP in tensors and message.step > self._repeats:
            self.request.on_latents(tensors)
        self._seconds[message.step] = message.seconds
        if self._on_step is not None:
            self._on_step(message.step, message.steps, tensors.get("denoised"))

    def survive(self, error: RankFailed, device: str | None) -> str:
        """Gives up trials after the ranks failed; returns what happens next, which the result's notes also say."""
        self.give_up_trials()
        self._repeats = max(self._seconds, default=0)
        cause = error.summary
        goes_on = f"goes on after step {self._step}" if self._step else "begins again"
        text = f"{error.who(device)} failed ({cause}); the job {goes_on} on processes started anew"
        self._notes += (text,)
        return text

    def give_up_trials(self) -> bool:
        """Cancels the remaining trials; returns True if there were any."""
        if not self.trials:
            return False
        self._given_up = tuple(Trial(strategy) for strategy in self.trials.strategies)
        self.trials = NO_TRIALS
        self._notes += ("no other strategies were tried after that",)
        return True

    def merged(self, info: RunInfo) -> RunInfo:
        """Returns the record of the whole job. `info`: the record of its part after the last crash."""
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
