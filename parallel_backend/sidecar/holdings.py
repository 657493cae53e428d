"""The holdings of a group's ranks as ComfyUI's process knows them: model, LoRAs, prompts and VAE, awake or asleep."""

from __future__ import annotations

import collections
from dataclasses import dataclass, replace
from pathlib import Path

from ..errors import Cancelled, CheckpointError, RequestError
from ..requests import LoadInfo, ModelSpec, Placement, SleepInfo
from ..strategy import ParallelStrategy
from ..wire import deadlines
from ..wire.protocol import Load, Sleep, Wake
from ..wire.weight_patches import WeightPatches
from .events import Loaded, emit
from .exchange import AGREED_ERRORS, reports
from .group import RankGroupRunner
from .lease import Lease
from .lora_client import LorasOnRanks
from .phases import Phase, PhaseKind
from .prompt_cache import KnownPrompts
from .vae_client import VaeOnRanks

_CALLS_REMEMBERED = 20  # whose times give the next one's deadline


@dataclass(frozen=True)
class HeldModel:
    """The model that the ranks hold. `identity`: the file's inode, size and time, since a path can be overwritten;
    `weights`: how it is split over the ranks (ParallelStrategy.weights)."""

    spec: ModelSpec
    weights: ParallelStrategy
    identity: tuple[int, ...]
    info: LoadInfo


class RankHoldings:
    """Of the ranks of one sidecar. `asleep`: the level at which they sleep, 0 for awake; `call_seconds`: of earlier
    model calls by placement and shape of x, for the next one's deadline."""

    asleep: int
    held: HeldModel | None
    prompts: KnownPrompts
    call_seconds: dict[tuple[Placement, tuple[int, ...]], collections.deque[float]]
    _loras: LorasOnRanks
    _woken_with: tuple[ModelSpec, ParallelStrategy] | None  # the model discarded at level 2

    def __init__(self, ranks: RankGroupRunner) -> None:
        self._ranks = ranks
        self.vae = VaeOnRanks(ranks.devices)
        self.forget()

    @property
    def model(self) -> ModelSpec | None:
        """The one in the devices' memory; None for nothing, or while the ranks sleep."""
        return None if self.held is None or self.asleep else self.held.spec

    def forget(self) -> None:
        """The ranks are gone, and all that they held."""
        self.asleep, self._woken_with = 0, None
        self._forget_model()

    def _forget_model(self) -> None:
        self.held = None
        self.prompts = KnownPrompts()
        self._loras = LorasOnRanks()
        self.call_seconds = collections.defaultdict(lambda: collections.deque(maxlen=_CALLS_REMEMBERED))

    # What a request needs first.

    def ensure_started(self, lease: Lease) -> float:
        """Starts or wakes the ranks; returns the seconds that a start took, 0.0 when they ran."""
        if not self._ranks.running:
            return self._ranks.start(lease)
        if self.asleep:
            lease.on_phase(Phase(PhaseKind.WAKING))
            self._wake(lease)
        return 0.0

    def ensure_ready(
        self, spec: ModelSpec, strategy: ParallelStrategy, patches: WeightPatches, lease: Lease
    ) -> LoadInfo:
        """The model is loaded and its weights changed by `patches`, and by nothing else."""
        info = self._ensure_loaded(spec, strategy, lease)
        try:
            patched = self._loras.ensure(lease.exchange, patches, info.bytes, lease.on_phase)
        except (RequestError, Cancelled):
            raise  # the weights are known, or made known by the next request
        except BaseException:
            self._forget_model()
            raise
        return replace(info, patched=patched)

    def _ensure_loaded(self, spec: ModelSpec, strategy: ParallelStrategy, lease: Lease) -> LoadInfo:
        weights = strategy.weights
        spec = replace(spec, path=str(Path(spec.path).absolute()))
        try:
            status = Path(spec.path).stat()
        except OSError as error:
            raise CheckpointError(f"{spec.path} cannot be read: {error.strerror}.") from None
        identity = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
        self.ensure_started(lease)
        self._ranks.working()
        held = self.held
        if held is not None and (held.spec, held.weights, held.identity) == (spec, weights, identity):
            return replace(held.info, seconds=0.0, cached=True)
        lease.on_phase(Phase(PhaseKind.LOADING, Path(spec.path).name))
        exchange = lease.exchange(AGREED_ERRORS)
        exchange.send(Load(spec, weights))
        try:
            done = exchange.wait(lambda: deadlines.load_budget(status.st_size))
        except CheckpointError:
            raise  # the ranks still hold what they held
        except BaseException:
            self._forget_model()
            raise
        infos = reports(done, lambda answer: answer.load)
        info = replace(infos[0], seconds=max(one.seconds for one in infos))
        self._forget_model()
        self.held = HeldModel(spec, weights, identity, info)
        lease.on_phase(Phase(PhaseKind.LOADED, f"{info.seconds:.1f}"))
        emit(Loaded(self._ranks.devices, spec, info))
        return info

    # Sleep.

    def sleep(self, level: int, lease: Lease) -> SleepInfo:
        """As Sidecar.sleep."""
        if not self._ranks.running or self.asleep >= level:
            return SleepInfo(0.0, 0)
        held = self.held
        info = self._move(Sleep(level), lease)
        self.asleep = level
        self.vae.forget()
        if level == 2:
            self._forget_model()
            self._woken_with = None if held is None else (held.spec, held.weights)
        return info

    def wake(self, lease: Lease) -> SleepInfo:
        """As Sidecar.wake."""
        level, model = self.asleep, self._woken_with
        if not level or not self._ranks.running:
            return SleepInfo(0.0, 0)
        info = self._wake(lease)
        if level == 2 and model is not None:
            info = SleepInfo(self._ensure_loaded(*model, lease).seconds, 0)
        return info

    def _wake(self, lease: Lease) -> SleepInfo:
        level, self.asleep, self._woken_with = self.asleep, 0, None
        return self._move(Wake(), lease) if level == 1 else SleepInfo(0.0, 0)

    def _move(self, message: Sleep | Wake, lease: Lease) -> SleepInfo:
        """Has every rank move its weights."""
        size = 0 if self.held is None else self.held.info.bytes
        exchange = lease.exchange(AGREED_ERRORS)
        exchange.send(message)
        try:
            done = exchange.wait(lambda: deadlines.load_budget(size))
        except BaseException:
            self._forget_model()  # who knows where the weights are
            raise
        moved = reports(done, lambda answer: answer.sleep)
        return SleepInfo(max(one.seconds for one in moved), sum(one.freed_bytes for one in moved))
