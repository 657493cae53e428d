"""A sampling job as it stands outside the ranks, so that it goes on where it was when they crash."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..errors import RankFailed, RequestError
from ..requests import LoopState, RunInfo, SampleRequest
from ..trials import NO_TRIALS, Trial, TrialPlan
from ..wire.payloads import Tensors, sample_tensors, state_tensors, take_state
from ..wire.protocol import Progress
from ..wire.transport import MOST_BYTES

OnStep = Callable[[int, int, Tensor | None], None]


class LoopRecord:
    """What model calls of ComfyUI's loop gave so far, as rank 0 sends it part by part. A part that got lost ends it."""

    def __init__(self) -> None:
        self.step = 0
        self._parts: list[Tensor] = []
        self._calls = 0

    def add(self, part: LoopState) -> None:
        if part.first == self._calls:
            self.step = part.step
            self._parts.append(part.answers)
            self._calls += len(part.answers)

    def joined(self) -> LoopState:
        self._parts = [torch.cat(self._parts)]
        return LoopState(self.step, 0, self._parts[0])


@dataclass(frozen=True)
class ShippedRequest:
    """A job of ComfyUI's objects. `noise`: of the shape of its latent; `tensors(holdings)`: its payload for the ranks
    of these RankHoldings, without what they were sent before; `is_call`: it is one call of the network, whose answer
    may have another shape, or several parts; `imports()`: the packs that the ranks import for it first; `trials`:
    strategies that it tries on its way; each is exact and needs the placement's own weights, on all ranks or on the
    first one."""

    noise: Tensor
    steps: int
    tensors: Callable[[object], Tensors]
    cache_threshold: float = 0.0
    is_call: bool = False
    imports: Callable[[], str] = str
    trials: TrialPlan = NO_TRIALS


class ResumableJob:
    """One request, and what is known of it so far; a plain one (SampleRequest) begins again after a crash.

    The record lives no longer than its request, whose weights' file stays the same (Lease.file). `trials`: those that
    it still makes; after a failure, which may be a trial's own, it makes none.
    """

    def __init__(
        self,
        request: SampleRequest | ShippedRequest,
        on_step: OnStep | None,
    ) -> None:
        self.request = request
        self.trials = request.trials if isinstance(request, ShippedRequest) else NO_TRIALS
        self._given_up: tuple[Trial, ...] = ()
        self._tensors: Tensors = {}  # of a shipped request: made for the ranks that run it
        if isinstance(request, SampleRequest):
            self._tensors = sample_tensors(request)
        self._on_step = on_step
        self._record = LoopRecord()
        self._seconds: dict[int, float] = {}  # of each step, 1-based
        self._first = 0  # steps that the ranks did not have to run again
        self._notes: tuple[str, ...] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the latent."""
        return tuple(self.request.noise.shape)

    @property
    def has_cache(self) -> bool:
        """True if a step cache answers some of its model calls."""
        return isinstance(self.request, ShippedRequest) and self.request.cache_threshold > 0

    def begin(self, holdings: object = None) -> Tensors:
        """Returns the payload for ranks that hold the job's model. `holdings`: what they were sent. Raises RequestError
        for more than they can be sent at once."""
        if isinstance(self.request, ShippedRequest):
            self._tensors = self.request.tensors(holdings)
            needed = sum(tensor.nbytes for tensor in self._tensors.values())
            if needed > MOST_BYTES:
                raise RequestError(
                    f"The job has {needed / 2**30:.1f} GiB beside its model (other models that its nodes use, prompts, "
                    f"latents), and at most {MOST_BYTES / 2**30:.1f} GiB can be sent to the devices at once. Load the "
                    f"other models from .safetensors files in the dtype that they have there, so that the devices can "
                    f"read them; or take their nodes out."
                )
        self._first = self._record.step
        return self._tensors | state_tensors(self._record.joined()) if self._first else self._tensors

    def take(self, message: Progress, tensors: Tensors | None) -> None:
        """Rank 0's word on a step."""
        tensors = dict(tensors or {})
        if (state := take_state(tensors)) is not None:
            self._record.add(state)
        self._seconds[message.step] = message.seconds
        if self._on_step is not None:
            self._on_step(message.step, message.steps, tensors.get("denoised"))

    def survive(self, error: RankFailed, device: str | None) -> str:
        """Says what happens now that the ranks failed, here and in the result's notes."""
        self.give_up_trials()
        cause = error.summary
        step = self._record.step
        goes_on = f"goes on after step {step}" if step else "begins again"
        text = f"{error.who(device)} failed ({cause}); the job {goes_on} on processes started anew"
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
