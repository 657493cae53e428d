"""The record in ComfyUI's process of what a group's ranks hold: models, text encoders and VAEs, awake or asleep."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..cluster.model_files import content_of
from ..devices import is_cpu, machine_of
from ..errors import OutOfMemory, RequestError
from ..requests import LoadInfo, ModelSpec
from ..strategy import ParallelStrategy
from ..wire import deadlines
from ..wire.file_identity import check_same
from ..wire.payloads import Tensors
from ..wire.protocol import Done, KeepModels, Load, Message, MoveOut, RankModels, TakeBack
from .group.events import Loaded, emit
from .group.exchange import AGREED_ERRORS, Exchange, reports
from .group.group import RankGroupRunner
from .group.lease import Lease, Phase, PhaseKind
from .model_room import (
    LACK_OF_MEMORY,
    CountedModel,
    CountedModule,
    ModelKey,
    Room,
    absolute,
    choose_to_drop,
    free_room,
    new_number,
    predict_room,
    slowest,
)


class RankInventory:
    """The record of what a group's ranks hold, which their answers update. `models`: least recently used first;
    `modules`: text encoders and VAEs by number, the oldest first; `is_synced`: False after a failed load: the ranks may
    have dropped models, so ask them first."""

    models: list[CountedModel]
    is_synced: bool

    def __init__(self, devices: tuple[str, ...]) -> None:
        self.devices = devices
        self.modules: dict[int, CountedModule] = {}
        self.forget_models()

    def forget_models(self) -> None:
        self.models, self.is_synced = [], False

    def find(self, key: ModelKey) -> CountedModel | None:
        return next((model for model in self.models if model.key == key), None)

    @property
    def numbers(self) -> tuple[int, ...]:
        """The numbers of all that the ranks hold, in the order in which they drop it if memory runs out."""
        return (*self.modules, *(model.number for model in self.models))

    def bytes_on(self, spec: ModelSpec, device: str) -> int:
        """Returns the bytes of `device` memory that the model occupies."""
        if device not in self.devices:
            return 0
        rank = self.devices.index(device)
        return sum(model.bytes_on(rank) for model in self.models if model.key.spec == absolute(spec))

    def module_bytes(self, device: str, number: int | None = None) -> int:
        """Returns the bytes of an accelerator that text encoders and VAEs occupy. `number`: counts this one alone."""
        if is_cpu(self.devices) or device not in self.devices:
            return 0
        rank = self.devices.index(device)
        counted = [held for one, held in self.modules.items() if number in (None, one)]
        return sum(held.infos[rank].device_bytes for held in counted)

    @property
    def has_modules_on_devices(self) -> bool:
        """True if a text encoder or VAE lies on an accelerator."""
        return any(map(self.module_bytes, self.devices))

    def notes_on_gone(self, models: list[CountedModel], reasons: dict[CountedModel, str]) -> list[str]:
        """Returns a note for each of `models` that the ranks have dropped since: by one of the `reasons`, else for lack
        of memory."""
        gone = [model for model in models if model not in self.models]
        return [f"dropped {model.key.name}: {reasons.get(model, LACK_OF_MEMORY)}" for model in gone]

    def load(self, message: Load, tensors: Tensors, size: int, exchange: Exchange) -> list[LoadInfo]:
        """Makes the ranks load what `message` names, of `size` bytes; returns the record of each rank."""
        done, (first, *_) = self._change(message, exchange, deadlines.load_budget(size), tensors)
        if first.models[-1:] != (message.model,):
            raise exchange.refuse(f"the processes hold {first.models} after they were given {message.model}")
        return reports(done, lambda answer: answer.load)

    def keep(
        self, models: list[CountedModel], lease: Lease, *, modules: Sequence[int] | None = None
    ) -> list[RankModels]:
        """Makes the ranks drop all but these models and `modules` (None: all); returns what each rank then holds."""
        module_numbers = tuple(self.modules if modules is None else modules)
        message = KeepModels((*module_numbers, *(model.number for model in models)))
        return self._change(message, lease.exchange(AGREED_ERRORS), deadlines.LOAD_BASE)[1]

    def move(self, message: MoveOut | TakeBack, lease: Lease) -> None:
        """Makes the ranks move weights; models that then have no room are dropped."""
        size = sum(held.info.bytes for held in self.models)
        exchange = lease.exchange(AGREED_ERRORS)
        try:
            self._change(message, exchange, deadlines.load_budget(size))
        except BaseException:
            self.forget_models()  # where the weights are now is unknown
            raise

    def _change(
        self, message: Message, exchange: Exchange, budget: float, tensors: Tensors | None = None
    ) -> tuple[list[Done], list[RankModels]]:
        """Sends a message that changes what the ranks hold, and updates this record by what they report. Returns their
        answers, and what each of them then holds."""
        self.is_synced = False
        exchange.send(message, tensors or None)
        done = exchange.wait(lambda: budget)
        ranks = reports(done, lambda answer: answer.models)
        if len({rank.models for rank in ranks}) > 1:
            raise exchange.refuse(f"processes hold different models: {[rank.models for rank in ranks]}")
        self.models = [model for model in self.models if model.number in ranks[0].models]
        self.modules = {number: one for number, one in self.modules.items() if number in ranks[0].models}
        self.is_synced = True
        return done, ranks


class RankHoldings:
    """The holdings of one sidecar's ranks. `sent`: the sender's record of what they got beside; None once they end
    or sleep, since they then lose it."""

    held: RankInventory
    sent: Any
    _discarded: tuple[ModelKey, ...] | None  # the models that sleeping ranks held before; None if awake

    def __init__(self, ranks: RankGroupRunner) -> None:
        self._ranks = ranks
        self._took: dict[ModelKey, Room] = {}  # by each model when it was loaded before
        self.one_at_a_time = False  # True once memory ran out in a request beside other held models
        self._pending_notes: list[str] = []  # dropped models, reported with the next request
        self.forget()

    @property
    def models(self) -> tuple[ModelSpec, ...]:
        """The models in the devices' memory, the most recently used first; empty while the ranks sleep."""
        return tuple(held.key.spec for held in reversed(self.held.models))

    @property
    def asleep(self) -> bool:
        """True if the ranks have discarded all that they held (`sleep`)."""
        return self._discarded is not None

    @property
    def current(self) -> CountedModel:
        """The model that was made ready last."""
        return self.held.models[-1]

    def forget(self) -> None:
        """Notes that the ranks are gone, and all that they held."""
        self._discarded, self.sent, self.held = None, None, RankInventory(self._ranks.devices)

    # Preparing a request.

    def ensure_started(self, lease: Lease) -> float:
        """Starts or wakes the ranks; returns the seconds that a start took, 0.0 if they were running."""
        if not self._ranks.running:
            return self._ranks.start(lease)
        if self.asleep:
            lease.on_phase(Phase(PhaseKind.WAKING))
            self._discarded = None
        return 0.0

    def ensure_ready(self, spec: ModelSpec, strategy: ParallelStrategy, lease: Lease) -> LoadInfo:
        """Loads the model if needed and makes it the current one. Its file must be `lease.file`; if that is None, the
        file at its path now is used and noted there."""
        started = time.perf_counter()
        key = ModelKey.of(spec, strategy, lease.file)
        self.ensure_started(lease)
        self._ranks.working()
        if not self.held.is_synced and self.held.models:
            self.held.keep(self.held.models, lease)
        held = self.held.find(key)
        if held is not None and held.offloaded_ranks:
            held = self._take_back(key, lease)
        if held is None:
            info = self._load(key, lease)
        else:
            switched = held is not self.current
            if switched:
                others = [model for model in self.held.models if model is not held]
                self.held.models = [*others, held]  # one assignment, since other threads read it
                lease.on_phase(Phase(PhaseKind.SWITCHED, key.name))
            seconds = time.perf_counter() - started if switched else 0.0
            notes = self._take_pending_notes()
            info = replace(held.info, seconds=seconds, cached=True, switched=switched, notes=notes)
        lease.file = key.identity
        return info

    def preload(self, spec: ModelSpec, strategy: ParallelStrategy, lease: Lease) -> LoadInfo:
        """Loads a model ahead of its first request. Raises RequestError if there is no room beside the held ones."""
        key = ModelKey.of(spec, strategy)
        self.ensure_started(lease)
        self._ranks.working()
        free = self.free_room(lease)
        if (held := self.held.find(key)) is not None:
            return replace(held.info, seconds=0.0, cached=True, notes=())
        for model, reason in self._conflicts(key, free).items():
            raise RequestError(
                f"{key.name} was not loaded ahead of its prompt: {model.key.name} would have to go ({reason})."
            )
        if lacking := free.lacks(self._needed(key)):
            most = max(*lacking.devices, lacking.host)
            raise RequestError(
                f"{key.name} was not loaded ahead of its prompt: {most / 2**30:.1f} GiB of memory are missing for it."
            )
        try:
            return self._load_alongside(key, {}, lease, yields=True)
        except OutOfMemory:
            raise RequestError(
                f"{key.name} was not loaded ahead of its prompt: memory ended on the way. What was loaded stays."
            ) from None

    def _needed(self, key: ModelKey) -> Room:
        """Returns the memory that the model took before, or a prediction."""
        return self._took.get(key) or predict_room(key, self._ranks.devices)

    def _conflicts(self, key: ModelKey, free: Room) -> dict[CountedModel, str]:
        """Returns the held models to drop for `key`, each with the reason. `free`: the room now."""
        if self.one_at_a_time:
            return dict.fromkeys(self.held.models, "models are held one at a time now")
        return choose_to_drop(self.held.models, key, self._needed(key), free)

    def _load(self, key: ModelKey, lease: Lease) -> LoadInfo:
        """Loads one more model. If there is no room for all, drops text encoders and VAEs, then other models."""
        check_same(key.spec.path, key.identity)
        dropped: dict[CountedModel, str] = {}
        if self.held.models or self.held.has_modules_on_devices:
            free = self.free_room(lease)
            if self.held.has_modules_on_devices and free.lacks(self._needed(key)):
                free = self.drop_modules(lease)
            dropped = self._conflicts(key, free)
        return self._load_alongside(key, dropped, lease)

    def _load_alongside(
        self,
        key: ModelKey,
        dropped: dict[CountedModel, str],
        lease: Lease,
        *,
        yields: bool = False,
    ) -> LoadInfo:
        """Loads a model in place of those `dropped`, by the reason for each. `yields`: if memory runs out, fails and
        drops no more."""
        before = list(self.held.models)
        self.held.models = [model for model in before if model not in dropped]
        lease.on_phase(Phase(PhaseKind.LOADING, key.name, key.identity.size))
        number = new_number()
        content = content_of(Path(key.spec.path)) if any(map(machine_of, self._ranks.devices)) else None
        message = Load(key.spec, key.weights, number, self.held.numbers, yields, content)
        try:
            infos = self.held.load(message, {}, key.identity.size, lease.exchange(AGREED_ERRORS))
        except OutOfMemory:
            if not yields:
                self.held.forget_models()  # others were dropped for it, and that did not help
            raise
        takes = Room(tuple(info.device_bytes for info in infos), sum(info.host_bytes for info in infos))
        self._took[key] = takes
        self._pending_notes += self.held.notes_on_gone(before, dropped)
        info = replace(slowest(infos), model=key.name, notes=() if yields else self._take_pending_notes())
        self.held.is_synced = False
        check_same(key.spec.path, key.identity)  # if it changed, ranks may have read different files
        self.held.is_synced = True
        self.held.models.append(CountedModel(number, key, info, takes))
        for note in info.notes:
            lease.on_phase(Phase(PhaseKind.DROPPED, note))
        lease.on_phase(Phase(PhaseKind.LOADED, f"{info.seconds:.1f}"))
        emit(Loaded(self._ranks.devices, key.spec, info))
        return info

    def load_module(self, message: Load, tensors: Tensors, size: int, exchange: Exchange) -> CountedModule:
        """Loads the text encoder or VAE in the payload `tensors` on the ranks. `size`: bytes of its weights."""
        before = list(self.held.models)
        found = CountedModule(message.rank, tuple(self.held.load(message, tensors, size, exchange)))
        self.held.modules = {**self.held.modules, message.model: found}  # other threads read it
        self._pending_notes += self.held.notes_on_gone(before, {})
        return found

    # Giving memory back.

    def give_back(self, spec: ModelSpec, device: str, lease: Lease) -> None:
        """Frees what the model takes of one device; other devices keep theirs. Weights that are not in the file move to
        host memory: those may be all, so if the host has no room for all of them, all ranks drop the model."""
        rank = self._ranks.devices.index(device)
        held = [
            model for model in self.held.models if model.key.spec == absolute(spec) and model.bytes_on(rank)
        ]
        if not self._ranks.running or not held:
            return
        if free_room(()).host < sum(model.bytes_on(rank) for model in held):
            self.drop(spec, lease)
            return
        for model in held:
            self.held.move(MoveOut(rank, model.number), lease)
            model.offloaded_ranks |= {rank}

    def _take_back(self, key: ModelKey, lease: Lease) -> CountedModel | None:
        """Moves weights that were given back to their devices again. Returns None if that dropped the model `key`."""
        lease.on_phase(Phase(PhaseKind.WAKING))
        before = self.held.models
        self.held.move(TakeBack(), lease)
        self._pending_notes += self.held.notes_on_gone(before, {})
        for model in self.held.models:
            model.offloaded_ranks = frozenset()
        return self.held.find(key)

    def drop(self, spec: ModelSpec, lease: Lease) -> None:
        """Drops one model, however it is split; the others stay."""
        staying = [model for model in self.held.models if model.key.spec != absolute(spec)]
        if self._ranks.running and len(staying) < len(self.held.models):
            self.held.keep(staying, lease)

    def drop_modules(self, lease: Lease) -> Room:
        """Makes the ranks drop text encoders and VAEs; returns the room then. The next call of one sends it again; most
        are mapped from their file."""
        return free_room(self.held.keep(self.held.models, lease, modules=()))

    def keep_modules(self, numbers: Sequence[int], lease: Lease) -> None:
        """Makes the ranks drop text encoders and VAEs with other numbers, which are no longer in use."""
        known = tuple(self.held.modules)
        in_use = [number for number in known if number in numbers]
        if len(in_use) < len(known) or (known and not self.held.is_synced):
            self.held.keep(self.held.models, lease, modules=in_use)

    def free_room(self, lease: Lease) -> Room:
        """Asks the ranks how much room there is for weights now."""
        return free_room(self.held.keep(self.held.models, lease))

    def drop_conflicting(self, spec: ModelSpec) -> bool:
        """Returns True if a request for `spec`, in which memory ran out, may be tried again without what else was held.
        From then on models are held one at a time."""
        conflicting = [model for model in self.held.models if model.key.spec != absolute(spec)]
        if self.one_at_a_time or not (conflicting or self.held.has_modules_on_devices):
            return False
        self.one_at_a_time = True
        self._pending_notes += [
            f"dropped {model.key.name}: memory ended in a request beside it, so models are held one at a time now"
            for model in conflicting
        ]
        return True

    def _take_pending_notes(self) -> tuple[str, ...]:
        notes, self._pending_notes = tuple(self._pending_notes), []
        return notes

    def sleep(self, lease: Lease) -> None:
        """Discards all that the ranks hold, see Sidecar.sleep."""
        if not self._ranks.running or self.asleep:
            return
        discarded = tuple(held.key for held in self.held.models)
        self.held.keep([], lease, modules=())
        self._discarded, self.sent = discarded, None

    def wake(self, lease: Lease) -> None:
        """Loads again what `sleep` discarded, see Sidecar.wake."""
        discarded, self._discarded = self._discarded or (), None
        for key in discarded:
            lease.file = None
            self.ensure_ready(key.spec, key.weights, lease)
