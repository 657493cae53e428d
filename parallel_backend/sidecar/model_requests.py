"""The requests that compute with a model that the ranks hold: sampling jobs, and calls of a network."""

from __future__ import annotations

import collections
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ..devices import is_cpu
from ..errors import TransportError
from ..job.payload import DENOISED, unpack_answer
from ..job.state_changes import take_changes
from ..options import CompileStats
from ..requests import LoadInfo, ModelSpec, Placement, RunInfo, SampleResult
from ..trials import LONGEST, MOST_STEPS
from ..wire import deadlines
from ..wire.payloads import Tensors
from ..wire.protocol import Compiling, Done, Message, Progress
from .group.events import Stepped, emit
from .group.exchange import Exchange, expect, reports
from .group.lease import Lease, OnPhase, Phase, PhaseKind
from .holdings import RankHoldings
from .resume import ResumableJob, ShippedRequest

STEPS_SHOWN = 60  # whose times a status shows


@dataclass
class StepProgress:
    """The progress of the running sampling job. `seconds`: how long each of its finished steps took."""

    step: int = 0
    steps: int = 0
    seconds: list[float] = field(default_factory=list)

    def end(self) -> None:
        """Notes that the job has ended; the times of its steps stay."""
        self.step = self.steps = 0


class CompileWatch:
    """The compilation state of one request. `size`: of what it computes, in words for the user."""

    def __init__(self, size: str, on_phase: OnPhase) -> None:
        self._phase = Phase(PhaseKind.COMPILING, size)
        self._on_phase = on_phase
        self._reported = False
        self._compiling = False

    def took(self, message: Message) -> bool:
        """Returns True if `message` says that a rank compiles; any other message ends that state."""
        self._compiling = isinstance(message, Compiling)
        if self._compiling and not self._reported:
            self._reported = True
            self._on_phase(self._phase)
        return self._compiling

    def budget(self, usual: float) -> float:
        """Returns the seconds allowed until the next sign of life: `usual`, and at least FIRST_STEP while compiling."""
        return max(usual, deadlines.FIRST_STEP) if self._compiling else usual


class ModelRequests:
    """The model requests of one sidecar. Each method needs leased ranks, and loads the model on them first."""

    def __init__(self, holdings: RankHoldings, devices: tuple[str, ...]) -> None:
        self._holdings = holdings
        self._devices = devices
        self.progress = StepProgress()

    def sample(self, spec: ModelSpec, job: ResumableJob, placement: Placement, lease: Lease) -> SampleResult:
        """Runs the job from its current state to its end."""
        trials = job.trials
        strategies = (placement.strategy, *trials.strategies)
        load, latent = self._holdings.ensure_ready(spec, placement.strategy, lease), job.request.noise
        shown: Phase | None = None
        under = collections.Counter[int]()  # number of steps under each strategy
        compiling = CompileWatch(latent_in_words(latent), lease.on_phase)
        held = self._holdings.current

        def on_message(rank: int, answer: Message, tensors: Tensors | None) -> None:
            nonlocal shown
            if compiling.took(answer):
                shown = None
                return
            step = expect(rank, answer, Progress)
            if not 0 <= step.strategy < len(strategies):
                raise TransportError(f"process {rank} names a strategy {step.strategy}, of {len(strategies)}")
            self.progress.step, self.progress.steps = step.step, step.steps
            seconds.append(step.seconds)
            under[step.strategy] += 1
            phase = Phase(PhaseKind.SAMPLING)
            if step.strategy > 0 and under[step.strategy] <= MOST_STEPS:
                which = f"{step.strategy + 1} of {len(strategies)}"
                phase = Phase(PhaseKind.TRYING, f"{strategies[step.strategy].describe()} ({which})")
            if phase != shown:
                shown = phase
                lease.on_phase(phase)
            emit(Stepped(self._devices, step.step, step.steps, step.seconds, strategies[step.strategy]))
            job.take(step, tensors)

        exchange = lease.exchange()
        seconds = self.progress.seconds
        seconds.clear()
        exchange.send(job.message(placement, held.number), job.begin(self._holdings))
        packs = job.request.imports()
        phase = Phase(PhaseKind.IMPORTING, packs) if packs else Phase(PhaseKind.FIRST_STEP)
        exchange.guard(lambda: lease.on_phase(phase))

        def budget() -> float:  # steps that a step cache answered are no measure for the others
            if trials and len(seconds) <= LONGEST:  # one device takes as many times longer as there are ranks
                return max(deadlines.FIRST_STEP, len(self._devices) * self._step_budget(seconds, latent))
            steps = [max(seconds)] if job.request.cache_threshold > 0 and seconds else seconds
            return compiling.budget(self._step_budget(steps, latent))

        done = exchange.wait(budget, on_message)
        changes, denoised = take_changes(exchange.result), exchange.result.pop(DENOISED, None)
        parts, step_seconds = _take_answer(exchange, job.request)
        info = _run_info(done, load, step_seconds)
        return SampleResult(parts[0], job.merged(info), tuple(parts), denoised, changes)

    def _step_budget(self, earlier: Sequence[float], latent: object) -> float:
        """Returns how many seconds the next step may take."""
        usual = deadlines.step_budget(earlier)
        if earlier:
            return usual
        return usual + deadlines.size_allowance(_positions(latent), is_cpu(self._devices))


def latent_in_words(latent: object) -> str:
    """Returns a latent's size in words; "this model" for one of several parts (video and sound), which is no Tensor."""
    if not isinstance(latent, Tensor) or latent.ndim < 2:
        return "this model"
    return f"a latent of {' x '.join(map(str, latent.shape[1:]))}"


def _positions(latent: object) -> int:
    """Returns the positions of a latent [B, C, ...] in all B images; 0 for one of several parts, which is no Tensor."""
    if not isinstance(latent, Tensor) or latent.ndim < 3 or not latent.numel():
        return 0
    return latent.numel() // latent.shape[1]


def _take_answer(exchange: Exchange, request: ShippedRequest) -> tuple[list[Tensor], tuple[float, ...]]:
    """Returns the parts of rank 0's answer in float32, several only for a call of the network, and the seconds of each
    step. Ends the ranks if it is anything else."""
    result = exchange.result
    parts, seconds = unpack_answer(result), result.get("step_seconds")
    fits = len(parts) == 1 or (request.is_call and len(parts) > 1)
    if request.cfg is not None:  # a sampler of ComfyUI or of a pack may return another size than it was given
        fits = [part.shape for part in parts] == [request.noise.shape]
    fits = fits and all(part.dtype == torch.float32 for part in parts)
    if not fits or seconds is None or len(result) != len(parts) + 1:
        found = {name: f"{list(one.shape)} {one.dtype}" for name, one in result.items()}
        raise exchange.refuse(f"process 0 answered with the tensors {found}")
    return parts, tuple(seconds.tolist())


def _run_info(done: list[Done], load: LoadInfo, step_seconds: tuple[float, ...]) -> RunInfo:
    """Returns one record for all ranks."""
    runs = reports(done, lambda answer: answer.run)
    return replace(
        runs[0],
        step_seconds=step_seconds,
        bytes_sent=tuple(sent for run in runs for sent in run.bytes_sent),
        notes=tuple(dict.fromkeys(note for run in runs for note in run.notes)),
        exact=all(run.exact for run in runs),
        inside_seconds=tuple(inside for run in runs for inside in run.inside_seconds),
        compiled=_most([run.compiled for run in runs if run.compiled is not None]),
        load=load,
    )


def _most(compiled: list[CompileStats]) -> CompileStats | None:
    """Returns the maximum over all ranks: each compiles for itself at the same time."""
    if not compiled:
        return None
    return CompileStats(
        max(one.graphs for one in compiled),
        max(one.seconds for one in compiled),
        max(one.uncompiled for one in compiled),
    )
