"""A text encoder that runs on the ranks: in ComfyUI's process a tree of modules stands in for it."""

from __future__ import annotations

import copy
import hashlib
import logging
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import replace
from typing import Any

import comfy.hooks
import comfy.model_management
import comfy.model_patcher
import torch
from comfy.model_patcher import ModelPatcher
from torch import Tensor

from ...parallel_backend.devices import machine_of
from ...parallel_backend.errors import RequestError
from ...parallel_backend.job.payload import EncoderCall, HeldTextEncoder
from ...parallel_backend.job.pickling import CannotBeSent, Known, pickle_job
from ...parallel_backend.job.tensors import SentTensors
from ...parallel_backend.planner.rules import StrategySettings
from ...parallel_backend.requests import ComfyUISource
from ...parallel_backend.sidecar import pool
from ...parallel_backend.sidecar.group.lease import ShowPhase, State
from ...parallel_backend.sidecar.module_requests import ModuleAnswer, ModuleKind, ModuleRequest
from ...parallel_backend.sidecar.sidecar import Sidecar
from ..host.calls import errors_as_comfyuis, interrupted, refusal, report_progress
from ..host.comfyui_flags import comfyui_root, numeric_flags
from ..host.memory import drop_modules, modules_on
from ..host.offload import is_loaded, unload
from ..host.prompt_graph import Prompt, ancestry
from ..host.prompt_links import clip_before, current_node, running_prompt
from ..model.mapped import mapped_words
from .file_tensors import FileTensors
from .model import SharedByClones, WeightlessPatcher
from .outline import CaughtMethod, Outline, unloaded
from .ship import HeldByRanks, Shipment, held_numbers
from .vae import choose_ranks

log = logging.getLogger(__name__)

# The only method that is called ahead for a waiting prompt: others may draw random numbers.
_EARLY = "encode_token_weights"
_LOOK = 0.05  # s between two checks for an interrupt
MOST_EARLY = 16  # answers made ahead that wait for their calls

# Methods through which ComfyUI and packs run a text encoder, in addition to calling its modules.
_METHODS = ("encode_token_weights", "encode", "generate", "process_tokens", "forward")


class NotNow(Exception):
    """A text cannot be encoded ahead now: the devices that hold its encoder are busy, or no device holds it."""


class EarlyAnswers:
    """Answers that devices compute ahead of the calls of waiting prompts, each for one call. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tensors = SentTensors()
        self._answers: OrderedDict[bytes, Future[Any]] = OrderedDict()

    def begin(self, shipment: _EncoderShipment) -> tuple[Future[Any], bool]:
        """Returns the future of a call's answer, and True if it is new: the caller must then complete it."""
        with self._lock:
            key = shipment.key(self._tensors)
            if key in self._answers:
                return self._answers[key], False
            while len(self._answers) >= MOST_EARLY:
                self._answers.popitem(last=False)
            found = self._answers[key] = Future()
            return found, True

    def forget(self, future: Future[Any]) -> None:
        """Drops the future of an answer that could not be computed."""
        with self._lock:
            self._answers = OrderedDict((key, one) for key, one in self._answers.items() if one is not future)

    def take(self, shipment: _EncoderShipment) -> Future[Any] | None:
        """Removes and returns the future of a call that was made ahead, or is being made; None for other calls."""
        with self._lock:
            return self._answers.pop(shipment.key(self._tensors), None) if self._answers else None


class Encoder(HeldByRanks, SharedByClones):
    """The encoder of `source`, shared by all clones of its patcher. `placement`: one of module_requests.PLACEMENTS."""

    def __init__(
        self, source: comfy.model_patcher.ModelPatcher, settings: StrategySettings, placement: str
    ) -> None:
        super().__init__()
        self.early = EarlyAnswers()
        unload(source)
        FileTensors(running_prompt() or {}, "").map_into(source.model)
        self._stand_for(source, settings, placement)

    def _stand_for(
        self, source: comfy.model_patcher.ModelPatcher, settings: StrategySettings, placement: str
    ) -> None:
        self._source = source
        self._unload_stock()
        self.outline = Outline(source, unloaded, unloaded)
        self._settings, self._placement = settings, placement
        is_stock = type(source).__module__ == comfy.model_patcher.__name__
        self._kind = comfy.model_patcher.ModelPatcher if is_stock else type(source)
        self._bytes = sum(parameter.nbytes for parameter in self.outline.base.parameters())
        SharedByClones.__init__(self)
        self._catch_calls()

    def _unload_stock(self) -> None:
        """Has ComfyUI unload the encoder if it has loaded it: hooks of prompts write LoRAs into its weights, and the
        stand-in shares them."""
        unload(self._source)

    def _catch_calls(self) -> None:
        me = weakref.ref(self)
        for path, module in self.outline.base.named_modules():
            module._compiled_call_impl = CaughtMethod(me, module, path, "")
            for name in _METHODS:
                if hasattr(type(module), name):
                    module.__dict__[name] = CaughtMethod(me, module, path, name)

    def patcher_of(self, source: comfy.model_patcher.ModelPatcher) -> EncoderPatcher:
        """Returns a patcher with everything that nodes have put on `source`. It moves no weights."""
        made: Any = source.clone()
        made.__class__ = EncoderPatcher
        made.become(self.outline.base)
        made.encoder, made.size = self, 0
        found: EncoderPatcher = made
        self.add(found)
        return found

    def call(self, path: str, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls `method` (if "", the module itself) of the ranks' module at `path`, and returns the answer."""
        patcher = self.loaded
        assert patcher is not None, "its modules live no longer than a patcher"
        self._unload_stock()
        shipment = _EncoderShipment(self, EncoderCall(patcher, path, method, args, kwargs))
        return _on(comfy.model_management.intermediate_device(), self._answer(shipment, method))

    def _answer(self, shipment: _EncoderShipment, method: str) -> Any:
        early = self.early.take(shipment) if method == _EARLY else None
        return shipment.run() if early is None else _wait_for(early, shipment)


class EarlyEncoder(Encoder):
    """A second stand-in for the same encoder, with which nodes of a waiting prompt run in another thread. It shares no
    module with the first. Its calls run while the devices are idle, and their answers are stored in `early`."""

    def __init__(self, patcher: EncoderPatcher, should_cancel: Callable[[], bool]) -> None:
        """`patcher`: one of the first stand-in."""
        first = patcher.encoder
        self.number, self.early, self._should_cancel = first.number, first.early, should_cancel
        self._stand_for(first._source, first._settings, first._placement)
        # Methods in place of an encoder's call the first stand-in's modules; they are held, so that their ids stay
        # theirs. ComfyUI warns of modules without a patcher.
        self._first = patcher
        self.outline.known.update(first.outline.known)

    def _unload_stock(self) -> None:
        if is_loaded(self._source):  # by the running prompt: only its thread may unload it
            raise NotNow

    def _answer(self, shipment: _EncoderShipment, method: str) -> Any:
        if method != _EARLY:
            raise NotNow
        future, is_new = self.early.begin(shipment)
        if not is_new:
            return future.result()
        try:
            future.set_result(shipment.run_early(self._should_cancel))
        except BaseException as error:
            self.early.forget(future)
            future.set_exception(error)
            raise
        return future.result()


# The attributes under which text encoders, and encoders of pictures and sound, have their modules.
_MODULES = ("cond_stage_model", "model")


def stand_in_of(clip: Any, encoder: Encoder) -> Any:
    """Returns a copy of `clip` that computes with `encoder`."""
    found = clip.clone() if hasattr(clip, "clone") else copy.copy(clip)
    found.patcher = encoder.patcher_of(clip.patcher)
    found.load_device = found.patcher.load_device
    setattr(found, next(name for name in _MODULES if hasattr(clip, name)), encoder.outline.base)
    return found


class EncoderPatcher(WeightlessPatcher):
    """A patcher that reports to ComfyUI's memory manager what the ranks hold of the encoder on ComfyUI's device. It is
    unloaded only as a whole. The rest is ComfyUI's own patcher."""

    encoder: Encoder

    def clone(self, *args: Any, **kwargs: Any) -> EncoderPatcher:
        if kwargs.get("force_deepcopy"):
            raise refusal("a copy of a text encoder's weights", "train it without Parallel CLIP")
        _note_place(self)
        found: EncoderPatcher = super().clone(*args, **kwargs)
        found.encoder = self.encoder
        self.encoder.add(found)
        return found

    def partially_load(self, *args: Any, **kwargs: Any) -> int:
        _note_place(self)
        self.encoder.load(self)
        self.current_hooks = self.forced_hooks
        return 0

    def partially_unload(self, *args: Any, **kwargs: Any) -> int:
        freed = self.loaded_size()
        return freed if drop_modules() else 0

    def model_size(self) -> int:
        return max(1, self.loaded_size())  # a divisor

    def loaded_size(self) -> int:
        return modules_on(self.load_device, self.encoder.number)

    def detach(self, unpatch_all: bool = True) -> Any:
        if unpatch_all:
            drop_modules()
        return self.model

    def patch_hooks(self, hooks: comfy.hooks.HookGroup) -> None:
        self.current_hooks = hooks  # the ranks apply their LoRAs

    def unpatch_hooks(self, whitelist_keys_set: set[str] | None = None) -> None:
        self.current_hooks = None


# Patchers of CLIPs, by (digest of the node that gave the CLIP, index of its output). ComfyUI gives the same CLIP to
# later prompts as long as nothing before that output is different.
_by_place: dict[tuple[str, int], weakref.ref[EncoderPatcher]] = {}


def _note_place(patcher: EncoderPatcher) -> None:
    """Notes the output that gave the running node this patcher's CLIP."""
    current = current_node()
    place = None if current is None else clip_before(*current)
    if current is None or place is None:
        return
    for gone in [key for key, one in _by_place.items() if one() is None]:
        del _by_place[gone]
    _by_place[ancestry(current[0], place[0]), place[1]] = weakref.ref(patcher)


def patcher_given_by(prompt: Prompt, node: str, slot: int) -> EncoderPatcher | None:
    """Returns the patcher of the CLIP that this output gave to a node of an earlier prompt; None if unknown."""
    return _by_place.get((ancestry(prompt, node), slot), lambda: None)()


class _EncoderShipment(Shipment):
    """One call of a text encoder on its way to the ranks."""

    def __init__(self, encoder: Encoder, work: EncoderCall) -> None:
        super().__init__(encoder.outline, work, work.patcher.load_device)
        self._encoder = encoder

    def key(self, tensors: SentTensors) -> bytes:
        """Returns a digest that is equal for calls with the same answer. `tensors`: numbers the tensors in it."""
        words, _held = mapped_words()
        job = replace(self._job, random_states=())
        return hashlib.sha256(pickle_job(job, self._known | words, tensors, ModelPatcher).data).digest()

    def run(self) -> Any:
        sidecar, _, _ = choose_ranks(self._encoder._settings)
        with errors_as_comfyuis():
            answer = self._ask(sidecar, report_progress, interrupted)
        for note in (*answer.notes, *self._store(answer.changes)):
            log.warning(note)
        report_progress(f"encoded in {answer.seconds:.2f} s on {', '.join(answer.devices)}")
        return answer.value

    def run_early(self, should_cancel: Callable[[], bool]) -> Any:
        """Makes the call on ranks that hold the encoder and are idle. Raises NotNow or ParallelError, such
        as RequestError for a call that changes something for later ones: only the prompt itself may."""
        sidecar = idle_holder(self._encoder.number)
        if sidecar is None or not sidecar.jobs.acquire(blocking=False):
            raise NotNow
        try:
            answer = self._ask(sidecar, None, should_cancel, waits=False)
        finally:
            sidecar.jobs.release()
        if answer.changes or answer.notes:
            raise RequestError("its nodes keep something for later texts.")
        return answer.value

    def _ask(
        self,
        sidecar: Sidecar,
        on_phase: ShowPhase | None,
        should_cancel: Callable[[], bool],
        waits: bool = True,
    ) -> ModuleAnswer:
        encoder = self._encoder
        self._is_elsewhere = any(map(machine_of, sidecar.devices))
        alone = HeldTextEncoder(encoder.outline.pristine, encoder._kind)
        request = ModuleRequest(
            ModuleKind.TEXT,
            number=encoder.number,
            keep=held_numbers(),
            bytes=encoder._bytes,
            placement=encoder._placement,
            comfyui=ComfyUISource(comfyui_root(), numeric_flags()),
            module=lambda holdings: self._pack_module(holdings, alone),
            tensors=self._pack,
        )
        with self._sending(sidecar):
            return sidecar.call_module(request, on_phase=on_phase, should_cancel=should_cancel, waits=waits)

    def _refused(self, error: CannotBeSent, known: Known) -> RequestError:
        return RequestError(
            f"The devices cannot be given what a node has put on this CLIP: {error.problem}. It is held by "
            f"{error.held_by}. Take that node out, or connect its CLIP without Parallel CLIP."
        )


def idle_holder(number: int) -> Sidecar | None:
    """Returns idle ranks that hold the text encoder with this number; None if there are none."""
    idle = (one for one in pool.all_sidecars() if one.state is State.READY and number in one.held.modules)
    return next(idle, None)


def _wait_for(early: Future[Any], shipment: _EncoderShipment) -> Any:
    """Waits for an answer that is made ahead and returns it; makes the call itself if that failed."""
    while not early.done():
        wait([early], timeout=_LOOK)
        comfy.model_management.throw_exception_if_processing_interrupted()
    return shipment.run() if early.exception() is not None else early.result()


def _on(device: torch.device, value: Any) -> Any:
    """Returns `value` with its tensors on the device."""
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, dict):
        return {name: _on(device, one) for name, one in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_on(device, one) for one in value)
    return value
