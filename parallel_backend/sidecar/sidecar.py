"""Sidecar: the ranks of one device set as ComfyUI's process sees them; blocking calls, progress, cancel."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from ..errors import RankFailed, RequestError, StrategyError
from ..options import check_step_cache
from ..requests import (
    LoadInfo,
    ModelSpec,
    Placement,
    PredictRequest,
    RunInfo,
    SampleRequest,
    SampleResult,
    SleepInfo,
)
from ..strategy import ParallelStrategy
from ..wire import deadlines
from ..wire.calibration import Calibration
from ..wire.decode_messages import DecodeResult, VaeWeights, check_decode
from ..wire.protocol import Calibrate, Sample
from ..wire.weight_patches import NO_PATCHES, WeightPatches
from .exchange import reports
from .group import RankGroupRunner
from .holdings import RankHoldings
from .lease import ShouldCancel, State
from .model_requests import ModelRequests
from .phases import Phase, PhaseKind
from .resume import OnStep, SamplingJob
from .status import GroupStatus, read_ranks
from .supervisor import RANK_MODULE

ShowPhase = Callable[[str], None]


class Sidecar:
    """A group of ranks, one per device in `devices`, kept warm between requests.

    Requests are served one after another; any thread may call. When a rank crashes, the group is started again and its
    model loaded again, and the request goes on where it was, once (`resumes`); the second crash is raised, and the next
    request starts a group. Callbacks run in the calling thread: `on_step(step, steps, denoised)` with a
    1-based step and a preview [1, C, h, w] or None, `on_phase(text)`. Whatever a callback raises ends the request on
    the ranks, which stay warm, and is raised again. `should_cancel()` is asked at least every 50 ms.
    """

    def __init__(
        self, devices: tuple[str, ...], *, rank_module: str = RANK_MODULE, resumes: bool = True
    ) -> None:
        self._ranks = RankGroupRunner(devices, rank_module, resumes=resumes, forget=self._forget)
        self.devices = self._ranks.devices
        self._resumes = resumes
        self._holdings = RankHoldings(self._ranks)
        self._requests = ModelRequests(self._holdings, self.devices)

    def _forget(self) -> None:
        self._holdings.forget()

    @property
    def state(self) -> State:
        state = self._ranks.state
        return State.ASLEEP if self._holdings.asleep and state is State.READY else state

    @property
    def model(self) -> ModelSpec | None:
        """The one that the ranks hold in their devices' memory; None for nothing, or while they sleep."""
        return self._holdings.model

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of the ranks, in rank order; empty when there are none."""
        return self._ranks.pids

    def status(self) -> GroupStatus:
        """The ranks' state and progress, without asking them. Any thread, at any time."""
        model, progress = self.model, self._requests.progress
        return GroupStatus(
            devices=self.devices,
            state=self.state.value,
            reason=self._ranks.last_failure,
            phase=self._ranks.phase,
            model="" if model is None else Path(model.path).name,
            step=progress.step,
            steps=progress.steps,
            step_seconds=tuple(progress.seconds),
            ranks=read_ranks(self._ranks.group),
        )

    # Requests.

    def load(
        self,
        spec: ModelSpec,
        strategy: ParallelStrategy | None = None,
        on_phase: ShowPhase | None = None,
        should_cancel: ShouldCancel | None = None,
        patches: WeightPatches = NO_PATCHES,
    ) -> LoadInfo:
        """Makes the ranks hold `spec` as `strategy` splits it, each the whole model by default, changed by `patches`.

        Other requests do so by themselves. Raises CheckpointError for a file they refuse, RequestError for changes that
        do not fit it, which leave the weights as they were; the group stays usable.
        """
        with self._ranks.lease("load", should_cancel, on_phase) as lease:
            return self._ranks.through_a_crash(
                lambda: self._holdings.ensure_ready(spec, strategy or ParallelStrategy(), patches, lease),
                lease,
            )

    def sample(
        self,
        spec: ModelSpec,
        request: SampleRequest,
        placement: Placement,
        on_step: OnStep | None = None,
        on_phase: ShowPhase | None = None,
        should_cancel: ShouldCancel | None = None,
        patches: WeightPatches = NO_PATCHES,
    ) -> SampleResult:
        """Runs a whole sampling job on the ranks, starting and loading first where needed (RunInfo.load)."""
        self._check_placement(placement)
        check_step_cache(request.cache_threshold, placement.strategy)
        job = SamplingJob(request, on_step)
        message = Sample(
            placement=placement,
            cfg=float(request.cfg),
            sampler=request.sampler,
            seed=request.seed,
            previews=on_step is not None,
            states=self._resumes,
            cache_threshold=float(request.cache_threshold),
        )
        with self._ranks.lease("sample", should_cancel, on_phase) as lease:
            lease.strategy, lease.images = placement.strategy, len(request.noise)
            try:
                result = self._ranks.through_a_crash(
                    lambda: self._requests.sample(spec, job, message, patches, lease), lease, job.survive
                )
            finally:
                self._requests.progress.end()
            lease.info = result.info
            return result

    def predict(
        self,
        spec: ModelSpec,
        request: PredictRequest,
        placement: Placement,
        on_phase: ShowPhase | None = None,
        should_cancel: ShouldCancel | None = None,
        patches: WeightPatches = NO_PATCHES,
    ) -> tuple[Tensor, RunInfo]:
        """One model call: the velocity [R, C, h, w] float32 on the CPU, and how it ran, a load before it included."""
        self._check_placement(placement)
        with self._ranks.lease("predict", should_cancel, on_phase) as lease:
            lease.strategy = placement.strategy
            notes: list[str] = []

            def survive(error: RankFailed, device: str) -> str:
                notes.append(f"rank {error.rank} on {device} failed; a model call was made again")
                return notes[-1]

            velocity, info = self._ranks.through_a_crash(
                lambda: self._requests.predict(spec, request, placement, patches, lease), lease, survive
            )
            lease.info = replace(info, notes=(*info.notes, *notes))
            return velocity, lease.info

    def decode(
        self,
        vae: VaeWeights,
        latent: Tensor,
        shares: tuple[float, ...] = (),
        on_step: Callable[[int, int], None] | None = None,
        on_phase: ShowPhase | None = None,
        should_cancel: ShouldCancel | None = None,
    ) -> DecodeResult:
        """The image of `latent` [B, C, h, w], its rows shared out over all ranks. The model they hold stays loaded."""
        check_decode(latent, shares, len(self.devices))
        with self._ranks.lease("decode", should_cancel, on_phase) as lease:
            lease.images = len(latent)
            self._holdings.ensure_started(lease)
            self._ranks.working()
            return self._holdings.vae.decode(
                self._ranks.epoch, lease.exchange, vae, latent, shares, on_step, lease.on_phase
            )

    def calibrate(
        self,
        placement: Placement,
        *,
        budget_s: float = deadlines.CALIBRATION,
        thorough: bool = False,
        on_phase: ShowPhase | None = None,
        should_cancel: ShouldCancel | None = None,
    ) -> tuple[Calibration, ...]:
        """Measures the links between the ranks over the groups of `placement`, one answer per rank; needs no model."""
        self._check_placement(placement)
        with self._ranks.lease("calibrate", should_cancel, on_phase) as lease:
            self._holdings.ensure_started(lease)
            self._ranks.working()
            lease.on_phase(Phase(PhaseKind.MEASURING))
            exchange = lease.exchange()
            exchange.send(Calibrate(placement.strategy, budget_s, thorough))
            done = exchange.wait(lambda: budget_s + deadlines.FIRST_STEP)
            return tuple(reports(done, lambda answer: answer.calibration))

    def cancel(self) -> None:
        """Ends the request that is running, if any, at its next step; its caller gets Cancelled. Any thread."""
        self._ranks.cancel()

    # The ranks' life.

    def start(self, on_phase: ShowPhase | None = None) -> float:
        """Starts the ranks unless they run; returns the seconds it took, 0.0 when they ran."""
        with self._ranks.lease("start", None, on_phase) as lease:
            return self._holdings.ensure_started(lease)

    def sleep(self, level: int = 1, should_cancel: ShouldCancel | None = None) -> SleepInfo:
        """Gives the ranks' device memory back and leaves them running; the next request wakes them.

        Level 1 moves the weights to host memory; level 2 discards them, and waking loads them again. Ranks that do not
        run have nothing to give back.
        """
        if level not in (1, 2):
            raise RequestError(
                f"A sleep of level {level} is unknown; 1 keeps weights in host memory, 2 discards them."
            )
        with self._ranks.lease("sleep", should_cancel) as lease:
            return self._holdings.sleep(level, lease)

    def wake(self, on_phase: ShowPhase | None = None) -> SleepInfo:
        """Gives the ranks back what `sleep` took, bit for bit; ranks that are awake need nothing."""
        with self._ranks.lease("wake", None, on_phase) as lease:
            return self._holdings.wake(lease)

    def stop(self) -> None:
        """Ends the ranks and blocks until every one is gone. Any thread; a running request raises Cancelled."""
        self._ranks.stop()

    def stop_if_idle(self) -> bool:
        """As `stop`, but leaves ranks alone that serve a request; whether it ended them."""
        return self._ranks.stop_if_idle()

    def _check_placement(self, placement: Placement) -> None:
        size = placement.strategy.world_size
        if size != len(self.devices):
            raise StrategyError(
                f"{placement.strategy.describe()} needs {size} rank{'s' if size > 1 else ''}; this group has "
                f"{len(self.devices)}. Choose degrees whose product is {len(self.devices)}."
            )
