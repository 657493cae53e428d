"""Sidecar: the ranks of one device set as ComfyUI's process sees them; blocking calls, progress, cancel."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from ..errors import Cancelled, OutOfMemory, RankFailed, RequestError, StrategyError
from ..options import check_step_cache
from ..requests import (
    LoadInfo,
    ModelSpec,
    Placement,
    SampleRequest,
    SampleResult,
)
from ..strategy import ParallelStrategy
from ..wire import deadlines
from ..wire.calibration import Calibration
from ..wire.checks.findings import CheckSubject, Finding
from ..wire.file_identity import FileIdentity, result_note
from ..wire.protocol import Calibrate, Done, Message, Prepare, RunCheck
from .group.exchange import reports
from .group.group import RankGroupRunner
from .group.lease import Lease, Phase, PhaseKind, ShouldCancel, ShowPhase, State
from .group.supervisor import RANK_MODULE
from .holdings import RankHoldings, RankInventory
from .model_requests import STEPS_SHOWN, ModelRequests
from .module_requests import ModuleRequests
from .process.exit_status import BUS_ERROR
from .resume import OnStep, ResumableJob, ShippedRequest
from .status import GroupStatus, read_ranks

T = TypeVar("T")


class Sidecar(ModuleRequests):
    """A group of ranks, one per device in `devices`, kept warm between requests.

    Requests are served one after another; any thread may call. If a rank crashes, the group is restarted, its model is
    loaded again, and the request goes on where it was. A second crash is raised, and the next request starts a group.
    Callbacks run in the calling thread: `on_step(step, steps, denoised)` with a 1-based step and a preview [1, C, h, w]
    or None, `on_phase(text)`. An exception from a callback ends the request on the ranks, which stay warm, and is
    raised again. `should_cancel()` is called at least every 50 ms. `exclusive`: the GPUs are locked against exclusive
    ranks of other processes; a start raises DeviceError if such ranks use one.
    """

    def __init__(
        self,
        devices: tuple[str, ...],
        *,
        rank_module: str = RANK_MODULE,
        exclusive: bool = False,
    ) -> None:
        self._ranks = RankGroupRunner(
            devices, rank_module, exclusive=exclusive, forget=lambda: self._holdings.forget()
        )
        self.devices = self._ranks.devices
        self._holdings = RankHoldings(self._ranks)
        self._requests = ModelRequests(self._holdings, self.devices)
        # Held during a request that ships objects: what the ranks have of them is recorded when it has ended.
        self.jobs = threading.RLock()

    @property
    def state(self) -> State:
        state = self._ranks.state
        return State.ASLEEP if self._holdings.asleep and state is State.READY else state

    @property
    def models(self) -> tuple[ModelSpec, ...]:
        """The models in the devices' memory, the most recently used first; empty while the ranks sleep."""
        return self._holdings.models

    @property
    def held(self) -> RankInventory:
        """The record of what the ranks hold now."""
        return self._holdings.held

    @property
    def pids(self) -> tuple[int, ...]:
        """The process ids of the ranks, in rank order; empty if there are none."""
        return self._ranks.pids

    def status(self) -> GroupStatus:
        """Returns the ranks' state and progress without asking them. Any thread may call it at any time."""
        progress = self._requests.progress
        return GroupStatus(
            devices=self.devices,
            state=self.state.value,
            reason=self._ranks.last_failure,
            phase=self._ranks.phase,
            models=tuple(Path(model.path).name for model in self.models),
            step=progress.step,
            steps=progress.steps,
            step_seconds=tuple(progress.seconds[-STEPS_SHOWN:]),
            ranks=read_ranks(self._ranks.group),
        )

    # Requests.

    def load(
        self,
        spec: ModelSpec,
        strategy: ParallelStrategy | None = None,
        on_phase: ShowPhase | None = None,
        should_cancel: ShouldCancel | None = None,
    ) -> LoadInfo:
        """Loads `spec` on the ranks, split as `strategy` says; by default each rank holds the whole model. Other models
        that they hold stay if there is room for all.

        Other requests load their model by themselves. Raises CheckpointError for a file that the ranks refuse; the
        group stays usable.
        """
        with self._ranks.lease("load", should_cancel, on_phase) as lease:
            lease.spec = spec
            return self._with_room(
                lambda: self._holdings.ensure_ready(spec, strategy or ParallelStrategy(), lease),
                spec,
                lease,
            )

    def preload(self, spec: ModelSpec, strategy: ParallelStrategy | None = None) -> LoadInfo:
        """Loads `spec` ahead of its first request. Raises RequestError if a request has the ranks, or if there is no
        room beside what they hold, which stays."""
        waiting = True
        try:
            with self._ranks.lease("preload", waits=False) as lease:
                waiting, lease.spec = False, spec
                return self._holdings.preload(spec, strategy or ParallelStrategy(), lease)
        except Cancelled:
            if not waiting:  # somebody stopped the ranks
                raise
            raise RequestError("Nothing was loaded: a prompt is using the devices.") from None

    def sample(
        self,
        spec: ModelSpec,
        request: SampleRequest | ShippedRequest,
        placement: Placement,
        on_step: OnStep | None = None,
        on_phase: ShowPhase | None = None,
        should_cancel: ShouldCancel | None = None,
        file: FileIdentity | None = None,
    ) -> SampleResult:
        """Runs a whole sampling job on the ranks; starts them and loads the model first if needed (RunInfo.load).

        `file`: the model's file, None for the one at its path now; the job uses no other one. Raises CheckpointError
        if another one is there and the ranks have to read it.
        """
        if isinstance(request, SampleRequest):
            request = ShippedRequest.of(request)
        self._check_placement(placement)
        check_step_cache(request.cache_threshold, placement.strategy)
        self._check_trials(request, placement)
        job = ResumableJob(request, on_step)
        with self._ranks.lease("sample", should_cancel, on_phase) as lease:
            lease.strategy, lease.images, lease.spec = placement.strategy, len(request.noise), spec
            lease.file = file

            def attempt() -> SampleResult:
                try:
                    return self._requests.sample(spec, job, placement, lease)
                except OutOfMemory:
                    if not job.give_up_trials():  # a trial may need more than was predicted
                        raise
                return attempt()

            try:
                result = self._with_room(attempt, spec, lease, job.survive)
            finally:
                self._requests.progress.end()
            change = "" if lease.file is None else result_note(spec.path, lease.file)
            notes = (*result.info.notes, change) if change else result.info.notes
            lease.info = replace(result.info, notes=notes, held_seconds=lease.seconds)
            return replace(result, info=lease.info)

    def calibrate(
        self,
        placement: Placement,
        *,
        budget_s: float = deadlines.CALIBRATION,
        thorough: bool = False,
        on_phase: ShowPhase | None = None,
    ) -> tuple[Calibration, ...]:
        """Measures the links between the ranks over the groups of `placement`, one answer per rank; needs no model."""
        self._check_placement(placement)
        with self._ranks.lease("calibrate", None, on_phase) as lease:
            message = Calibrate(placement.strategy, budget_s, thorough)
            done = self._ask(message, budget_s + deadlines.FIRST_STEP, lease, Phase(PhaseKind.MEASURING))
            return tuple(reports(done, lambda answer: answer.calibration))

    def check(self, name: str, subject: CheckSubject, limit_s: float) -> tuple[tuple[Finding, ...], ...]:
        """Runs a check of the GPU check on the ranks themselves; returns the findings of each."""
        with self._ranks.lease("check") as lease:
            done = self._ask(RunCheck(name, subject), limit_s, lease)
            return tuple(reports(done, lambda answer: answer.findings))

    def _ask(self, message: Message, limit_s: float, lease: Lease, phase: Phase | None = None) -> list[Done]:
        """Sends a request that needs no model to the ranks, started if needed; returns their answers."""
        self._holdings.ensure_started(lease)
        self._ranks.working()
        if phase is not None:
            lease.on_phase(phase)
        exchange = lease.exchange()
        exchange.send(message)
        return exchange.wait(lambda: limit_s)

    def _with_room(
        self,
        attempt: Callable[[], T],
        spec: ModelSpec,
        lease: Lease,
        survive: Callable[[RankFailed, str | None], str] | None = None,
    ) -> T:
        """Returns `attempt()`, tried again after a crash, and without the other held models if memory ran out."""

        def read() -> T:
            try:
                return attempt()
            except RankFailed as error:
                if error.cause.startswith(BUS_ERROR):
                    # If a file was cut short, no device is at fault, and a restart would crash again.
                    for held in self._holdings.held.models:
                        held.check_file()
                raise

        try:
            return self._ranks.retry_after_crash(read, lease, survive)
        except OutOfMemory:
            if not self._holdings.drop_conflicting(spec):
                raise
        lease.on_phase(Phase(PhaseKind.MAKING_ROOM))
        try:
            return self._ranks.retry_after_crash(read, lease, survive)
        except OutOfMemory:
            self._holdings.one_at_a_time = False  # dropping them did not help
            raise

    # Starting and ending ranks, and freeing memory.

    def start(self, on_phase: ShowPhase | None = None) -> float:
        """Starts the ranks unless they run; returns the seconds it took, 0.0 if they were running."""
        with self._ranks.lease("start", None, on_phase) as lease:
            return self._holdings.ensure_started(lease)

    def prepare(self, spec: ModelSpec) -> None:
        """Starts the ranks and makes them import what loading `spec` needs; does nothing if they run. Raises what a
        start raises."""
        with self._ranks.lease("start", None) as lease:
            if not self._ranks.running:
                self._ask(Prepare(spec), deadlines.LOAD_BASE, lease)

    def sleep(self, should_cancel: ShouldCancel | None = None) -> None:
        """Discards all that the ranks hold and leaves them running; the next request loads what it needs again. Does
        nothing if they do not run."""
        with self._ranks.lease("sleep", should_cancel) as lease:
            self._holdings.sleep(lease)

    def drop(self, spec: ModelSpec) -> None:
        """Drops one model and leaves the others where they are; the next request that needs it loads it again."""
        with self._ranks.lease("drop") as lease:
            self._holdings.drop(spec, lease)

    def give_back(self, spec: ModelSpec, device: str) -> None:
        """Frees what one model takes of one device. The device's rank keeps weights that are not in the file in
        host memory; the next request that needs the model moves all back."""
        with self._ranks.lease("give back") as lease:
            self._holdings.give_back(spec, device, lease)

    def drop_modules(self) -> None:
        """Makes the ranks drop text encoders and VAEs; the next call of one sends it again."""
        with self._ranks.lease("give back") as lease:
            if self._ranks.running:
                self._holdings.drop_modules(lease)

    def wake(self, on_phase: ShowPhase | None = None) -> None:
        """Loads again what `sleep` discarded; does nothing if the ranks are awake."""
        with self._ranks.lease("wake", None, on_phase) as lease:
            self._holdings.wake(lease)

    def stop(self) -> None:
        """Ends the ranks and waits until all are gone. Any thread may call; a running request raises Cancelled."""
        self._ranks.stop()

    def stop_if_idle(self) -> bool:
        """Ends the ranks, see `stop`, unless they serve a request; returns False in that case."""
        return self._ranks.stop_if_idle()

    def _check_trials(self, request: ShippedRequest, placement: Placement) -> None:
        trials = request.trials
        for strategy in trials.strategies:
            self._check_placement(replace(placement, strategy=strategy))
        used = (placement.strategy, *trials.strategies)
        interchangeable = len({strategy.weights for strategy in used}) == 1 and all(s.exact for s in used)
        if trials and (not interchangeable or request.cache_threshold > 0):
            raise StrategyError(
                f"Steps of one job cannot run under {', then '.join(s.describe() for s in used)}: only without a step "
                f"cache, and among exact strategies that hold the same weights on each device."
            )

    def _check_placement(self, placement: Placement) -> None:
        """Raises StrategyError unless `placement` uses all ranks, or one: that is the first, and the others wait."""
        size = placement.strategy.world_size
        if size not in (1, len(self.devices)):
            raise StrategyError(
                f"{placement.strategy.describe()} needs {size} process{'es' if size > 1 else ''}; this group has "
                f"{len(self.devices)}. Choose degrees whose product is {len(self.devices)}."
            )
