"""Sidecar: the ranks of one device set as ComfyUI's process sees them; blocking calls, progress, cancel."""

from __future__ import annotations

import collections
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from ..errors import Cancelled, CheckpointError, RankFailed, RequestError, StrategyError, TransportError
from ..options import CompileStats, check_step_cache
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
from ..wire.payloads import predict_tensors
from ..wire.protocol import Calibrate, Done, Load, Predict, Progress, Sample, Sleep, Wake
from ..wire.transport import pack_tensors
from ..wire.weight_patches import NO_PATCHES, WeightPatches
from .compile_progress import CompileWatch
from .events import Loaded, Stepped, tell
from .exchange import USER_ERRORS, Exchange
from .group import Lease, OnPhase, RankGroupRunner, ShouldCancel, State
from .lora_client import LorasOnRanks
from .prompt_cache import KnownPrompts
from .resume import OnStep, SamplingJob
from .status import GroupStatus, read_ranks
from .supervisor import RANK_MODULE
from .vae_client import VaeOnRanks

_STEPS_SHOWN = 60  # whose times a status has


@dataclass(frozen=True)
class _Held:
    """The model that the ranks hold. `identity`: the file's inode, size and time, since a path can be overwritten;
    `weights`: how it is split over the ranks (ParallelStrategy.weights)."""

    spec: ModelSpec
    weights: ParallelStrategy
    identity: tuple[int, ...]
    info: LoadInfo


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
        self._ranks = RankGroupRunner(devices, rank_module, resumes=resumes, forget=self._forget_memory)
        self.devices = self._ranks.devices
        self._resumes = resumes
        self._vae = VaeOnRanks(self.devices)
        self._steps = (0, 0)  # of the sampling job that runs
        self._step_seconds: collections.deque[float] = collections.deque(maxlen=_STEPS_SHOWN)
        self._forget_memory()

    @property
    def state(self) -> State:
        state = self._ranks.state
        return State.ASLEEP if self._asleep and state is State.READY else state

    @property
    def model(self) -> ModelSpec | None:
        """What the ranks hold in their devices' memory; None for nothing, or while they sleep."""
        held = self._held
        return None if held is None or self._asleep else held.spec

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of the ranks, in rank order; empty when there are none."""
        return self._ranks.pids

    def status(self) -> GroupStatus:
        """What the ranks are doing, without asking them. Any thread, at any time."""
        model, (step, steps) = self.model, self._steps
        return GroupStatus(
            devices=self.devices,
            state=self.state.value,
            reason=self._ranks.last_failure,
            phase=self._ranks.phase,
            model="" if model is None else Path(model.path).name,
            step=step,
            steps=steps,
            step_seconds=tuple(self._step_seconds),
            ranks=read_ranks(self._ranks.group),
        )

    def start(self, on_phase: OnPhase | None = None) -> float:
        """Starts the ranks unless they run; returns the seconds it took, 0.0 when they ran."""
        with self._ranks.turn("start", None, on_phase) as turn:
            return self._ensure_started(turn)

    def load(
        self,
        spec: ModelSpec,
        strategy: ParallelStrategy | None = None,
        on_phase: OnPhase | None = None,
        should_cancel: ShouldCancel | None = None,
        patches: WeightPatches = NO_PATCHES,
    ) -> LoadInfo:
        """Makes the ranks hold `spec` as `strategy` splits it, each the whole model by default, changed by `patches`.

        Raises CheckpointError for a file they refuse, RequestError for changes that do not fit it, which leave the
        weights as they were; the group stays usable.
        """
        with self._ranks.turn("load", should_cancel, on_phase) as turn:
            return self._ranks.through_a_crash(
                lambda: self._ensure_ready(spec, strategy, patches, turn), turn
            )

    def sample(
        self,
        spec: ModelSpec,
        request: SampleRequest,
        placement: Placement,
        on_step: OnStep | None = None,
        on_phase: OnPhase | None = None,
        should_cancel: ShouldCancel | None = None,
        patches: WeightPatches = NO_PATCHES,
    ) -> SampleResult:
        """Runs a whole sampling job on the ranks, starting and loading first where needed."""
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

        with self._ranks.turn("sample", should_cancel, on_phase) as turn:
            turn.strategy, turn.images = placement.strategy, len(request.noise)

            def attempt() -> SampleResult:
                self._ensure_ready(spec, placement.strategy, patches, turn)
                return self._run(job, message, turn)

            try:
                result = self._ranks.through_a_crash(attempt, turn, job.survive)
            finally:
                self._steps = (0, 0)
            turn.info = result.info
            return result

    def _run(self, job: SamplingJob, message: Sample, turn: Lease) -> SampleResult:
        """The job from where it is to its end, on ranks that hold its model."""
        seconds: list[float] = []
        compiling = CompileWatch(job.shape, turn.phase)

        def progress(rank: int, message, tensors: dict[str, Tensor] | None) -> None:
            if compiling.took(message):
                return
            self._ranks.expect(message, Progress, rank)
            seconds.append(message.seconds)
            self._steps, self._ranks.phase = (message.step, message.steps), "sampling"
            self._step_seconds.append(message.seconds)
            tell(Stepped(self.devices, message.step, message.steps, message.seconds, turn.strategy))
            job.take(message, tensors)

        exchange = self._ranks.exchange(turn)
        self._step_seconds.clear()
        self._send(exchange, message, job.begin(self._held.identity))
        exchange.guard(lambda: turn.phase("first step"))

        def budget() -> float:  # steps whose model calls a cache answered are no measure for the others
            steps = [max(seconds)] if message.cache_threshold and seconds else seconds
            return compiling.budget(deadlines.step_budget(steps))

        done = exchange.wait(budget, progress)
        result = self._result(exchange, {"latent": job.shape, "step_seconds": None})
        info = _run_info(done, step_seconds=tuple(result["step_seconds"].tolist()))
        return SampleResult(latent=result["latent"], info=job.told(info))

    def predict(
        self,
        spec: ModelSpec,
        request: PredictRequest,
        placement: Placement,
        on_phase: OnPhase | None = None,
        should_cancel: ShouldCancel | None = None,
        patches: WeightPatches = NO_PATCHES,
    ) -> tuple[Tensor, RunInfo]:
        """One model call: the velocity [R, C, h, w] float32 on the CPU, and how it ran."""
        self._check_placement(placement)
        with self._ranks.turn("predict", should_cancel, on_phase) as turn:
            turn.strategy = placement.strategy
            notes: list[str] = []

            def survive(error: RankFailed, device: str) -> str:
                notes.append(f"rank {error.rank} on {device} failed; a model call was made again")
                return notes[-1]

            velocity, info = self._ranks.through_a_crash(
                lambda: self._call_model(spec, request, placement, patches, turn), turn, survive
            )
            turn.info = replace(info, notes=(*info.notes, *notes))
            return velocity, turn.info

    def _call_model(
        self,
        spec: ModelSpec,
        request: PredictRequest,
        placement: Placement,
        patches: WeightPatches,
        turn: Lease,
    ) -> tuple[Tensor, RunInfo]:
        self._ensure_ready(spec, placement.strategy, patches, turn)
        key, is_new = self._prompts.find(request.conditioning)
        times = self._call_seconds[placement, tuple(request.x.shape)]
        try:
            tensors = predict_tensors(request, with_conditioning=is_new)
            message = Predict(placement, conditioning=key, forget=self._prompts.take_forgotten())
            exchange = self._ranks.exchange(turn)
            self._send(exchange, message, tensors)
            compiling = CompileWatch(request.x.shape, turn.phase)

            def answer(rank: int, message, tensors: dict[str, Tensor] | None) -> None:
                if not compiling.took(message):
                    self._refuse_message(rank, message, tensors)

            done = exchange.wait(lambda: compiling.budget(deadlines.step_budget(times)), answer)
            velocity = self._result(exchange, {"velocity": request.velocity_shape})["velocity"]
        except BaseException:
            if is_new:  # who knows whether the ranks have it
                self._prompts.drop(key)
            raise
        seconds = _reports(done, "run")[0].seconds
        times.append(seconds)
        return velocity, _run_info(done, step_seconds=(seconds,))

    def decode(
        self,
        vae: VaeWeights,
        latent: Tensor,
        shares: tuple[float, ...] = (),
        on_step: Callable[[int, int], None] | None = None,
        on_phase: OnPhase | None = None,
        should_cancel: ShouldCancel | None = None,
    ) -> DecodeResult:
        """The image of `latent` [B, C, h, w], its rows shared out over all ranks. The model they hold stays loaded."""
        check_decode(latent, shares, len(self.devices))
        with self._ranks.turn("decode", should_cancel, on_phase) as turn:
            turn.images = len(latent)

            def new_exchange(survivable: frozenset[str]) -> Exchange:
                return self._ranks.exchange(turn, survivable)

            self._ensure_started(turn)
            self._ranks.working()
            epoch = self._ranks.group.epoch
            return self._vae.decode(epoch, new_exchange, vae, latent, shares, on_step, turn.phase)

    def calibrate(
        self,
        placement: Placement,
        *,
        budget_s: float = deadlines.CALIBRATION,
        thorough: bool = False,
        on_phase: OnPhase | None = None,
        should_cancel: ShouldCancel | None = None,
    ) -> tuple[Calibration, ...]:
        """Measures the links between the ranks over the groups of `placement`, one answer per rank; needs no model."""
        self._check_placement(placement)
        with self._ranks.turn("calibrate", should_cancel, on_phase) as turn:
            self._ensure_started(turn)
            self._ranks.working()
            turn.phase("measuring the links")
            exchange = self._ranks.exchange(turn)
            exchange.send(Calibrate(placement.strategy, budget_s, thorough))
            done = exchange.wait(lambda: budget_s + deadlines.FIRST_STEP, self._refuse_message)
            return tuple(_reports(done, "calibration"))

    def sleep(self, level: int = 1, should_cancel: ShouldCancel | None = None) -> SleepInfo:
        """Gives the ranks' device memory back and leaves them running; the next request wakes them.

        Level 1 moves the weights to host memory; level 2 discards them, and waking loads them again. Ranks that do not
        run have nothing to give back.
        """
        if level not in (1, 2):
            raise RequestError(
                f"A sleep of level {level} is unknown; 1 keeps weights in host memory, 2 discards them."
            )
        with self._ranks.turn("sleep", should_cancel) as turn:
            if not self._ranks.running or self._asleep >= level:
                return SleepInfo(0.0, 0)
            held = self._held
            info = self._ask_all_to_move(Sleep(level), turn)
            self._asleep = level
            self._vae.forget()
            if level == 2:
                self._forget_model()
                self._woken_with = None if held is None else (held.spec, held.weights)
            return info

    def wake(self, on_phase: OnPhase | None = None) -> SleepInfo:
        """Gives the ranks back what `sleep` took, bit for bit; ranks that are awake need nothing."""
        with self._ranks.turn("wake", None, on_phase) as turn:
            level, model = self._asleep, self._woken_with
            if not level or not self._ranks.running:
                return SleepInfo(0.0, 0)
            info = self._wake(turn)
            if level == 2 and model is not None:
                info = SleepInfo(self._ensure_loaded(*model, turn).seconds, 0)
            return info

    def _wake(self, turn: Lease) -> SleepInfo:
        level, self._asleep, self._woken_with = self._asleep, 0, None
        return self._ask_all_to_move(Wake(), turn) if level == 1 else SleepInfo(0.0, 0)

    def _ask_all_to_move(self, message: Sleep | Wake, turn: Lease) -> SleepInfo:
        size = 0 if self._held is None else self._held.info.bytes
        # As with a load, ranks agree before they report.
        exchange = self._ranks.exchange(turn, survivable=USER_ERRORS | {"OutOfMemory"})
        exchange.send(message)
        try:
            done = exchange.wait(lambda: deadlines.load_budget(size), self._refuse_message)
        except BaseException:
            self._forget_model()  # who knows where the weights are
            raise
        moved = _reports(done, "sleep")
        return SleepInfo(max(one.seconds for one in moved), sum(one.freed_bytes for one in moved))

    def cancel(self) -> None:
        """Ends the request that is running, if any, at its next step; its caller gets Cancelled. Any thread."""
        self._ranks.cancel()

    def stop(self) -> None:
        """Ends the ranks and blocks until every one is gone. Any thread; a running request raises Cancelled."""
        self._ranks.stop()

    def stop_if_idle(self) -> bool:
        """As `stop`, but leaves ranks alone that serve a request; whether it ended them."""
        return self._ranks.stop_if_idle()

    # What a request needs first.

    def _ensure_started(self, turn: Lease) -> float:
        if not self._ranks.running:
            return self._ranks.start(turn)
        if self._asleep:
            turn.phase("waking the ranks")
            self._wake(turn)
        return 0.0

    def _ensure_ready(
        self,
        spec: ModelSpec,
        strategy: ParallelStrategy | None,
        patches: WeightPatches,
        turn: Lease,
    ) -> LoadInfo:
        """The model is loaded and its weights changed by `patches`, and by nothing else."""
        info = self._ensure_loaded(spec, strategy, turn)
        try:
            patched = self._patches.ensure(
                lambda survivable: self._ranks.exchange(turn, survivable), patches, info.bytes, turn.phase
            )
        except (RequestError, Cancelled):
            raise  # the weights are known, or made known by the next request
        except BaseException:
            self._forget_model()
            raise
        return replace(info, patched=patched)

    def _ensure_loaded(self, spec: ModelSpec, strategy: ParallelStrategy | None, turn: Lease) -> LoadInfo:
        weights = ParallelStrategy() if strategy is None else strategy.weights
        spec = replace(spec, path=str(Path(spec.path).absolute()))
        try:
            status = Path(spec.path).stat()
        except OSError as error:
            raise CheckpointError(f"{spec.path} cannot be read: {error.strerror}.") from None
        identity = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
        self._ensure_started(turn)
        self._ranks.working()
        wanted = (spec, weights, identity)
        if self._held is not None and (self._held.spec, self._held.weights, self._held.identity) == wanted:
            return replace(self._held.info, seconds=0.0, cached=True)
        turn.phase(f"loading {Path(spec.path).name}")
        # Ranks agree on a load before they report, so an out-of-memory there leaves no collective half done.
        exchange = self._ranks.exchange(turn, survivable=USER_ERRORS | {"OutOfMemory"})
        exchange.send(Load(spec, weights))
        try:
            done = exchange.wait(lambda: deadlines.load_budget(status.st_size), self._refuse_message)
        except CheckpointError:
            raise  # the ranks still hold what they held
        except BaseException:
            self._forget_model()
            raise
        infos = _reports(done, "load")
        info = replace(infos[0], seconds=max(i.seconds for i in infos))
        self._forget_model()
        self._held = _Held(*wanted, info)
        tell(Loaded(self.devices, spec, info))
        return info

    def _forget_memory(self) -> None:
        """The ranks are gone, and all that they held."""
        self._asleep = 0  # level
        self._woken_with: tuple[ModelSpec, ParallelStrategy] | None = None  # the model discarded at level 2
        self._forget_model()

    def _forget_model(self) -> None:
        self._held: _Held | None = None
        self._prompts = KnownPrompts()
        self._patches = LorasOnRanks()
        # Seconds of earlier model calls by (placement, shape of x), for the next one's deadline.
        self._call_seconds: dict[tuple, collections.deque[float]] = collections.defaultdict(
            lambda: collections.deque(maxlen=20)
        )

    # Messages.

    @staticmethod
    def _send(exchange: Exchange, message: Sample | Predict, tensors: dict[str, Tensor]) -> None:
        payload = pack_tensors(tensors)
        try:
            exchange.send(message, payload)
        finally:
            os.close(payload)

    def _result(self, exchange: Exchange, shapes: dict[str, tuple[int, ...] | None]) -> dict[str, Tensor]:
        """Rank 0's tensors, named and shaped as they must be (None: any shape); those with a shape are float32."""
        result = exchange.result or {}
        found = {name: tuple(tensor.shape) for name, tensor in result.items()}
        fits = set(result) == set(shapes) and all(
            shape is None or (found[name], result[name].dtype) == (shape, torch.float32)
            for name, shape in shapes.items()
        )
        if not fits:
            raise self._ranks.refuse(f"rank 0 answered with the tensors {found}; expected {shapes}, float32")
        return result

    def _refuse_message(self, rank: int, message, tensors) -> None:
        self._ranks.expect(message, Done, rank)

    def _check_placement(self, placement: Placement) -> None:
        size = placement.strategy.world_size
        if size != len(self.devices):
            raise StrategyError(
                f"{placement.strategy.describe()} needs {size} rank{'s' if size > 1 else ''}; this group has "
                f"{len(self.devices)}. Choose degrees whose product is {len(self.devices)}."
            )


def _run_info(done: dict[int, Done], step_seconds: tuple[float, ...]) -> RunInfo:
    runs = _reports(done, "run")
    return RunInfo(
        engine=runs[0].engine,
        strategy=runs[0].strategy,
        step_seconds=step_seconds,
        bytes_sent=tuple(run.bytes_sent for run in runs),
        notes=tuple(dict.fromkeys(note for run in runs for note in run.notes)),
        exact=all(run.exact for run in runs),
        model_calls=runs[0].model_calls,
        reused_calls=runs[0].reused_calls,
        kernel=runs[0].kernel,
        compiled=_most([run.compiled for run in runs if run.compiled is not None]),
    )


def _most(compiled: list[CompileStats]) -> CompileStats | None:
    """Of all ranks, each of which compiles for itself at the same time."""
    if not compiled:
        return None
    return CompileStats(
        max(one.graphs for one in compiled),
        max(one.seconds for one in compiled),
        max(one.uncompiled for one in compiled),
    )


def _reports(done: dict[int, Done], name: str) -> list:
    """What each rank reported, in rank order."""
    found = [getattr(done[rank], name) for rank in sorted(done)]
    if None in found:
        raise TransportError(f"rank {found.index(None)} ended the request without saying how it ran")
    return found
