"""Sidecar: the ranks of one device set as ComfyUI's process sees them; blocking calls, progress, cancel."""

from __future__ import annotations

import collections
import enum
import itertools
import logging
import os
import platform
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from . import deadlines
from .calibration import Calibration
from .crash_history import CrashHistory
from .decoding import DecodeResult, VaeWeights, check_decode
from .errors import (
    Cancelled,
    CheckpointError,
    DeviceError,
    RankFailed,
    RequestError,
    StrategyError,
    TransportError,
)
from .exchange import USER_ERRORS, Exchange
from .failing_devices import FAILING, FAILURES_UNTIL_LEFT_OUT
from .patch_client import PatchesOnRanks
from .payloads import predict_tensors
from .prompts import KnownPrompts
from .protocol import (
    NO_REQUEST,
    VERSION,
    Calibrate,
    Done,
    Hello,
    Load,
    Predict,
    Progress,
    Ready,
    Sample,
    Setup,
    Sleep,
    Wake,
)
from .requests import (
    LoadInfo,
    ModelSpec,
    Placement,
    PredictRequest,
    RunInfo,
    SampleRequest,
    SampleResult,
    SleepInfo,
)
from .resume import OnStep, SamplingJob
from .strategy import ParallelStrategy
from .supervisor import RANK_MODULE, RankGroup, get_supervisor, require_linux
from .transport import pack_tensors
from .vae_client import VaeOnRanks
from .weight_patches import NO_PATCHES, WeightPatches

OnPhase = Callable[[str], None]
ShouldCancel = Callable[[], bool]

T = TypeVar("T")

log = logging.getLogger(__name__)


class State(enum.Enum):
    """DOWN -> STARTING -> READY <-> RUNNING; READY <-> ASLEEP; any -> FAILED -> STARTING; after three failures in ten
    minutes BROKEN, until those are past or somebody resets it."""

    DOWN = "down"
    STARTING = "starting"
    READY = "ready"
    RUNNING = "running"
    ASLEEP = "asleep"
    FAILED = "failed"
    BROKEN = "broken"


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
        if not devices:
            raise RequestError("A sidecar needs at least one device.")
        twice = [name for name in devices if devices.count(name) > 1]
        if twice:
            raise DeviceError(f"{twice[0]} is named twice; each rank needs a device of its own.")
        self.devices = tuple(devices)
        self._rank_module = rank_module
        self._resumes = resumes
        self._lock = threading.Lock()
        self._owner: int | None = None  # thread that serves a request
        self._cancel = threading.Event()
        self._activity = State.READY
        self._group: RankGroup | None = None
        self._requests = itertools.count(1)
        self._crashes = CrashHistory()
        self._last_failure: RankFailed | None = None
        self._asleep = 0  # level
        self._woken_with: tuple[ModelSpec, ParallelStrategy] | None = None  # the model discarded at level 2
        self._vae = VaeOnRanks(self.devices)
        self._forget_model()

    @property
    def state(self) -> State:
        group = self._group
        if self._crashes.is_broken:
            return State.BROKEN
        if group is None:
            return State.DOWN if self._last_failure is None else State.FAILED
        if group.ended.is_set():
            return State.FAILED
        if self._asleep and self._activity is State.READY:
            return State.ASLEEP
        return self._activity

    @property
    def model(self) -> ModelSpec | None:
        """What the ranks hold in their devices' memory; None for nothing, or while they sleep."""
        held = self._held
        return None if held is None or self._asleep else held.spec

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of the ranks, in rank order; empty when there are none."""
        group = self._group
        return () if group is None else group.pids

    def start(self, on_phase: OnPhase | None = None) -> float:
        """Starts the ranks unless they run; returns the seconds it took, 0.0 when they ran."""
        with self._turn(None) as cancelled:
            return self._ensure_started(on_phase, cancelled)

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
        with self._turn(should_cancel) as cancelled:
            return self._through_a_crash(
                lambda: self._ensure_ready(spec, strategy, patches, on_phase, cancelled), on_phase, cancelled
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
        job = SamplingJob(request, on_step)
        message = Sample(
            placement=placement,
            cfg=float(request.cfg),
            sampler=request.sampler,
            seed=request.seed,
            previews=on_step is not None,
            states=self._resumes,
        )

        with self._turn(should_cancel) as cancelled:

            def attempt() -> SampleResult:
                self._ensure_ready(spec, placement.strategy, patches, on_phase, cancelled)
                return self._run(job, message, on_phase, cancelled)

            return self._through_a_crash(attempt, on_phase, cancelled, job.survive)

    def _run(
        self, job: SamplingJob, message: Sample, on_phase: OnPhase | None, cancelled: ShouldCancel
    ) -> SampleResult:
        """The job from where it is to its end, on ranks that hold its model."""
        seconds: list[float] = []

        def progress(rank: int, message, tensors: dict[str, Tensor] | None) -> None:
            self._expect(message, Progress, rank)
            seconds.append(message.seconds)
            job.take(message, tensors)

        exchange = self._exchange(cancelled)
        self._send(exchange, message, job.begin(self._held.identity))
        if on_phase is not None:
            exchange.guard(lambda: on_phase("first step"))
        done = exchange.wait(lambda: deadlines.step_budget(seconds), progress)
        result = self._result(exchange, {"latent": job.shape, "step_seconds": None})
        info = _run_info(done, step_seconds=tuple(result["step_seconds"].tolist()))
        return SampleResult(latent=result["latent"], info=job.told(info))

    def predict(
        self,
        spec: ModelSpec,
        request: PredictRequest,
        placement: Placement,
        should_cancel: ShouldCancel | None = None,
        patches: WeightPatches = NO_PATCHES,
    ) -> tuple[Tensor, RunInfo]:
        """One model call: the velocity [R, C, h, w] float32 on the CPU, and how it ran."""
        self._check_placement(placement)
        with self._turn(should_cancel) as cancelled:
            notes: list[str] = []

            def survive(error: RankFailed, device: str) -> str:
                notes.append(f"rank {error.rank} on {device} failed; a model call was made again")
                return notes[-1]

            velocity, info = self._through_a_crash(
                lambda: self._call_model(spec, request, placement, patches, cancelled),
                None,
                cancelled,
                survive,
            )
            return velocity, replace(info, notes=(*info.notes, *notes))

    def _call_model(
        self,
        spec: ModelSpec,
        request: PredictRequest,
        placement: Placement,
        patches: WeightPatches,
        cancelled: ShouldCancel,
    ) -> tuple[Tensor, RunInfo]:
        self._ensure_ready(spec, placement.strategy, patches, None, cancelled)
        key, is_new = self._prompts.find(request.conditioning)
        times = self._call_seconds[placement, tuple(request.x.shape)]
        try:
            tensors = predict_tensors(request, with_conditioning=is_new)
            message = Predict(placement, conditioning=key, forget=self._prompts.take_forgotten())
            exchange = self._exchange(cancelled)
            self._send(exchange, message, tensors)
            done = exchange.wait(lambda: deadlines.step_budget(times), self._refuse_message)
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
        with self._turn(should_cancel) as cancelled:

            def new_exchange(survivable: frozenset[str]) -> Exchange:
                return self._exchange(cancelled, survivable)

            self._ensure_started(on_phase, cancelled)
            self._activity = State.RUNNING
            return self._vae.decode(self._group.epoch, new_exchange, vae, latent, shares, on_step, on_phase)

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
        with self._turn(should_cancel) as cancelled:
            self._ensure_started(on_phase, cancelled)
            self._activity = State.RUNNING
            if on_phase is not None:
                on_phase("measuring the links")
            exchange = self._exchange(cancelled)
            exchange.send(Calibrate(placement.strategy, budget_s, thorough))
            done = exchange.wait(lambda: budget_s + deadlines.FIRST_STEP, self._refuse_message)
            return tuple(_reports(done, "calibration"))

    def sleep(self, level: int = 1) -> SleepInfo:
        """Gives the ranks' device memory back and leaves them running; the next request wakes them.

        Level 1 moves the weights to host memory; level 2 discards them, and waking loads them again. Ranks that do not
        run have nothing to give back.
        """
        if level not in (1, 2):
            raise RequestError(
                f"A sleep of level {level} is unknown; 1 keeps weights in host memory, 2 discards them."
            )
        with self._turn(None) as cancelled:
            if self._group is None or self._group.ended.is_set() or self._asleep >= level:
                return SleepInfo(0.0, 0)
            held = self._held
            info = self._ask_all_to_move(Sleep(level), cancelled)
            self._asleep = level
            self._vae.forget()
            if level == 2:
                self._forget_model()
                self._woken_with = None if held is None else (held.spec, held.weights)
            return info

    def wake(self, on_phase: OnPhase | None = None) -> SleepInfo:
        """Gives the ranks back what `sleep` took, bit for bit; ranks that are awake need nothing."""
        with self._turn(None) as cancelled:
            level, model = self._asleep, self._woken_with
            if not level or self._group is None or self._group.ended.is_set():
                return SleepInfo(0.0, 0)
            info = self._wake(cancelled)
            if level == 2 and model is not None:
                info = SleepInfo(self._ensure_loaded(*model, on_phase, cancelled).seconds, 0)
            return info

    def _wake(self, cancelled: ShouldCancel) -> SleepInfo:
        level, self._asleep, self._woken_with = self._asleep, 0, None
        return self._ask_all_to_move(Wake(), cancelled) if level == 1 else SleepInfo(0.0, 0)

    def _ask_all_to_move(self, message: Sleep | Wake, cancelled: ShouldCancel) -> SleepInfo:
        size = 0 if self._held is None else self._held.info.bytes
        # As with a load, ranks agree before they report.
        exchange = self._exchange(cancelled, survivable=USER_ERRORS | {"OutOfMemory"})
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
        self._cancel.set()

    def stop(self) -> None:
        """Ends the ranks and blocks until every one is gone. Any thread; a running request raises Cancelled."""
        if self._owner == threading.get_ident():  # from a callback: the request cleans up as it ends
            self._cancel.set()
            if self._group is None:
                return
            get_supervisor().stop(self._group)
            return
        while not self._lock.acquire(timeout=deadlines.POLL):
            self._cancel.set()  # for a request that has not started the ranks yet
            if (group := self._group) is not None:
                get_supervisor().stop(group)
        try:
            self._discard_group()
            self._crashes.clear()
            self._last_failure = None
        finally:
            self._lock.release()

    # One request at a time.

    @contextmanager
    def _turn(self, should_cancel: ShouldCancel | None) -> Iterator[ShouldCancel]:
        """Waits for this caller's turn; gives the question whether it is cancelled; keeps count of failures."""
        require_linux()
        if self._owner == threading.get_ident():
            raise RequestError("A callback of a request may not send another request to the same ranks.")
        while not self._lock.acquire(timeout=deadlines.POLL):
            if should_cancel is not None and should_cancel():
                raise Cancelled("The request was cancelled while it waited for its turn.")
        self._owner = threading.get_ident()
        self._cancel.clear()
        try:
            if self._crashes.is_broken:
                raise self._crashes.refusal()
            yield lambda: self._cancel.is_set() or (should_cancel is not None and should_cancel())
            self._last_failure = None
        except RankFailed as error:
            self._count_failure(error)
            raise
        finally:
            self._activity = State.READY
            if self._group is not None and self._group.ended.is_set():
                self._discard_group()
            self._owner = None
            self._lock.release()

    def _count_failure(self, error: RankFailed) -> None:
        if not self._crashes.is_broken:  # else it is the refusal, or counted already
            self._crashes.add(error, self.devices[error.rank])
            FAILING.add(self.devices[error.rank])
        self._last_failure = error

    def _through_a_crash(
        self,
        attempt: Callable[[], T],
        on_phase: OnPhase | None,
        cancelled: ShouldCancel,
        survive: Callable[[RankFailed, str], str] | None = None,
    ) -> T:
        """`attempt()`, once more when the ranks crash; `survive(error, device)` is told first and says so in words.

        An error that the code raised would come again, and so would an out-of-memory: those are not tried again.
        """
        try:
            return attempt()
        except RankFailed as error:
            if not (error.crashed and self._resumes):
                raise
            self._count_failure(error)
            if self._crashes.is_broken:
                raise
            device = self.devices[error.rank]
            text = survive(error, device) if survive is not None else f"rank {error.rank} on {device} failed"
            log.warning("%s: %s", text, error.cause)
            self._discard_group()
            if on_phase is not None:
                on_phase(text)
            self._rest(cancelled)
            return attempt()

    def _rest(self, cancelled: ShouldCancel) -> None:
        """Gives a driver time to recover when this is not the first crash lately, twice as long each time."""
        earlier = self._crashes.count - 1
        until = time.monotonic() + (deadlines.BACK_OFF * 2 ** (earlier - 1) if earlier > 0 else 0.0)
        while time.monotonic() < until and not cancelled():
            time.sleep(deadlines.POLL)

    # Start, load, end.

    def _ensure_started(self, on_phase: OnPhase | None, cancelled: ShouldCancel) -> float:
        if self._group is not None and not self._group.ended.is_set():
            if self._asleep:
                if on_phase is not None:
                    on_phase("waking the ranks")
                self._wake(cancelled)
            return 0.0
        self._discard_group()
        begun = time.monotonic()
        self._activity = State.STARTING
        count = len(self.devices)
        if on_phase is not None:
            on_phase(f"starting {count} rank{'s' if count > 1 else ''}")
        self._group = group = get_supervisor().spawn(self.devices, self._rank_module)
        exchange = Exchange(group, NO_REQUEST, cancelled, terminal=Ready, survivable=frozenset())

        def answer(rank: int, message, tensors: dict[str, Tensor] | None) -> None:
            self._expect(message, Hello, rank)
            _check_versions(rank, message)
            setup = Setup(
                rank=rank,
                world_size=count,
                devices=self.devices,
                rendezvous=group.rendezvous,
                backend=_backend(self.devices),
            )
            exchange.send_to(rank, setup)

        limit = begun + deadlines.START
        try:
            exchange.wait(lambda: max(0.0, limit - time.monotonic()), answer)
        except RankFailed as error:
            error.crashed = False  # ranks that do not even start are no better off for starting again
            raise
        except DeviceError as error:
            for device in self.devices:
                if str(error).startswith(f"{device} "):  # a rank names its device first (rank_jobs.py)
                    FAILING.add(device, FAILURES_UNTIL_LEFT_OUT)
            raise
        self._activity = State.READY
        return time.monotonic() - begun

    def _ensure_ready(
        self,
        spec: ModelSpec,
        strategy: ParallelStrategy | None,
        patches: WeightPatches,
        on_phase: OnPhase | None,
        cancelled: ShouldCancel,
    ) -> LoadInfo:
        """The model is loaded and its weights changed by `patches`, and by nothing else."""
        info = self._ensure_loaded(spec, strategy, on_phase, cancelled)
        try:
            patched = self._patches.ensure(
                lambda survivable: self._exchange(cancelled, survivable), patches, info.bytes, on_phase
            )
        except (RequestError, Cancelled):
            raise  # the weights are known, or made known by the next request
        except BaseException:
            self._forget_model()
            raise
        return replace(info, patched=patched)

    def _ensure_loaded(
        self,
        spec: ModelSpec,
        strategy: ParallelStrategy | None,
        on_phase: OnPhase | None,
        cancelled: ShouldCancel,
    ) -> LoadInfo:
        weights = ParallelStrategy() if strategy is None else strategy.weights
        spec = replace(spec, path=str(Path(spec.path).absolute()))
        try:
            status = Path(spec.path).stat()
        except OSError as error:
            raise CheckpointError(f"{spec.path} cannot be read: {error.strerror}.") from None
        identity = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
        self._ensure_started(on_phase, cancelled)
        self._activity = State.RUNNING
        wanted = (spec, weights, identity)
        if self._held is not None and (self._held.spec, self._held.weights, self._held.identity) == wanted:
            return replace(self._held.info, seconds=0.0, cached=True)
        if on_phase is not None:
            on_phase(f"loading {Path(spec.path).name}")
        # Ranks agree on a load before they report, so an out-of-memory there leaves no collective half done.
        exchange = self._exchange(cancelled, survivable=USER_ERRORS | {"OutOfMemory"})
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
        return info

    def _forget_model(self) -> None:
        self._held: _Held | None = None
        self._prompts = KnownPrompts()
        self._patches = PatchesOnRanks()
        # Seconds of earlier model calls by (placement, shape of x), for the next one's deadline.
        self._call_seconds: dict[tuple, collections.deque[float]] = collections.defaultdict(
            lambda: collections.deque(maxlen=20)
        )

    def _discard_group(self) -> None:
        group, self._group, self._asleep, self._woken_with = self._group, None, 0, None
        if group is None:
            return
        get_supervisor().stop(group)
        if group.death is not None and self._last_failure is None:
            self._last_failure = group.death.error()
        group.close()
        self._forget_model()

    # Messages.

    def _exchange(self, cancelled: ShouldCancel, survivable: frozenset[str] = USER_ERRORS) -> Exchange:
        if cancelled():
            raise Cancelled("The request was cancelled before it reached the ranks.")
        return Exchange(self._group, next(self._requests), cancelled, survivable=survivable)

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
            get_supervisor().kill(self._group)
            raise TransportError(f"rank 0 answered with the tensors {found}; expected {shapes}, float32")
        return result

    def _expect(self, message, kind: type, rank: int) -> None:
        if not isinstance(message, kind):
            get_supervisor().kill(self._group)
            raise TransportError(f"rank {rank} sent {type(message).__name__} where {kind.__name__} was due")

    def _refuse_message(self, rank: int, message, tensors) -> None:
        self._expect(message, Done, rank)

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
        notes=runs[0].notes,
        exact=all(run.exact for run in runs),
    )


def _reports(done: dict[int, Done], name: str) -> list:
    """What each rank reported, in rank order."""
    found = [getattr(done[rank], name) for rank in sorted(done)]
    if None in found:
        raise TransportError(f"rank {found.index(None)} ended the request without saying how it ran")
    return found


def _backend(devices: tuple[str, ...]) -> str:
    return "nccl" if all(device.startswith("cuda") for device in devices) else "gloo"


def _check_versions(rank: int, hello: Hello) -> None:
    ours = (VERSION, platform.python_version(), str(torch.__version__))
    theirs = (hello.protocol, hello.python, hello.torch)
    if ours != theirs:
        raise RankFailed(
            rank,
            f"it runs protocol {theirs[0]}, Python {theirs[1]}, torch {theirs[2]}, but ComfyUI runs protocol "
            f"{ours[0]}, Python {ours[1]}, torch {ours[2]}; restart ComfyUI after an update.",
        )
