"""The text encoders and VAEs that a rank holds beside its models: ComfyUI's own modules, called as ComfyUI's process
would."""

from __future__ import annotations

import contextlib
import gc
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ...engine.comm.groups import Layouts, World
from ...engine.shared_layers import share_layers
from ...errors import Cancelled, ParallelError, RequestError
from ...job.answer_tree import pack_tree
from ...job.payload import INPUTS, EncoderCall, HalfVae, HeldTextEncoder, PickledJob, VaeCall
from ...job.restore import Original, make_changes, set_replaced
from ...job.unpickling import unpack_payload
from ...models.comfyui.jobs.mapped import find_in
from ...models.comfyui.jobs.patchers import encoder_patcher
from ...models.comfyui.jobs.samplers import call_encoder
from ...requests import ComfyUISource
from ...wire.heartbeat import heartbeat
from ...wire.payloads import Tensors
from ...wire.protocol import ALL_RANKS, CallModule, RankCall
from ..outcome.agreement import RanksApart, agree, agree_on_call, leave
from ..outcome.errors import as_refusal, is_device_failure, is_out_of_memory
from .reader import JobReader, set_random_states
from .vaes import HeldVae, StepCallback

if TYPE_CHECKING:
    from ...engine.bands.vae import RankGroups

_LOOK = 0.05  # s between two looks for a cancel


class HeldEncoder:
    """One encoder (reader.NamedModel). `rank`: the one that computes, ALL_RANKS where its layers are shared out."""

    is_sharded = False
    originals: Mapping[str, Tensor] = {}

    def __init__(self, module: nn.Module, kind: type, device: torch.device, rank: int) -> None:
        self.patcher = encoder_patcher(kind, module, device)
        self.rank = rank
        self.original = Original(module)
        self.last_patcher: object = None  # ComfyUI takes a model whose patcher is gone for a leak

    @property
    def module(self) -> nn.Module:
        found: nn.Module = self.patcher.model
        return found

    def find(self, word: tuple[Any, ...]) -> Any:
        return self.module if word[0] == "base" else find_in(self.module, *word)


class Modules:
    """The text encoders and VAEs that this rank holds, by their numbers in ComfyUI's process."""

    def __init__(
        self, layouts: Layouts, reader: JobReader, import_comfyui: Callable[[ComfyUISource], None]
    ) -> None:
        self._layouts, self._reader, self._import = layouts, reader, import_comfyui
        self._held: dict[int, HeldEncoder | HeldVae] = {}
        self._meeting = _Meeting(layouts.world, lambda: False)  # of the call that runs
        self._groups: RankGroups = {}  # of VAEs: a new one takes over those of the one before

    @property
    def numbers(self) -> tuple[int, ...]:
        """The numbers of all that is held."""
        return tuple(self._held)

    def drop(self) -> None:
        """Lets go of all of them."""
        self._keep(())

    def call(
        self, message: CallModule, tensors: Tensors, on_step: StepCallback
    ) -> tuple[Tensors | None, RankCall]:
        """Makes a call; returns its answer, None on all ranks but one, and how it went. Collective."""
        begun, world = time.perf_counter(), self._layouts.world
        self._keep(message.keep)
        self._meeting = _Meeting(world, on_step.is_cancelled)
        inputs = tensors.pop(INPUTS, None)
        error: Exception | None = None
        with contextlib.ExitStack() as undo:
            try:
                self._import(message.comfyui)
                head, new = unpack_payload(tensors)
                job = self._reader.read(head, new, lambda module: self._hold(message, module))
                set_replaced(job.replaced, self._reader.packages.find_module, undo)
                held = self._held[message.module]
                if isinstance(held, HeldVae):
                    assert isinstance(job.work, VaeCall), "a VAE is called with one"
                    inputs = held.check_call(inputs, job.work.shares)
            except Exception as failure:
                error = failure
            agree(world, error)
            if isinstance(held, HeldVae):
                return self._call_vae(held, head.module is not None, job, inputs, on_step, begun)
            return self._call_encoder(held, job, begun)

    def _call_vae(
        self,
        held: HeldVae,
        is_new: bool,
        job: PickledJob,
        inputs: Tensor | None,
        on_step: StepCallback,
        begun: float,
    ) -> tuple[Tensors | None, RankCall]:
        assert inputs is not None and isinstance(job.work, VaeCall), "the call was checked"
        error: Exception | None = None
        if is_new:
            try:
                held.check()
            except Exception as failure:
                error = failure
            agree(self._layouts.world, error)
        load_seconds = time.perf_counter() - begun
        answer, record = held.call(inputs, job.work.shares, on_step)
        return None if answer is None else pack_tree(answer), replace(record, load_seconds=load_seconds)

    def _call_encoder(
        self, held: HeldEncoder, job: PickledJob, begun: float
    ) -> tuple[Tensors | None, RankCall]:
        world, traffic = self._layouts.world, self._layouts.traffic
        sent = traffic.bytes_sent
        computes = held.rank in (world.rank, ALL_RANKS)
        error: Exception | None = None
        answer = None
        try:
            if computes:
                answer = self._run(held, job)
        except Exception as failure:
            is_known = isinstance(failure, ParallelError) or _is_fault(failure)
            error = failure if is_known else as_refusal(failure)
        if not self._meeting.has_ended:
            leave(world, error)
        elif error is not None:
            raise error
        weights = held.module.parameters() if computes else ()
        record = RankCall(
            seconds=time.perf_counter() - begun,
            bytes=sum(parameter.nbytes for parameter in weights),
            bytes_sent=traffic.bytes_sent - sent,
        )
        return (answer if world.rank == max(held.rank, 0) else None), record

    def _keep(self, numbers: Sequence[int]) -> None:
        before, self._held = self._held, {n: held for n, held in self._held.items() if n in numbers}
        is_smaller = len(self._held) < len(before)
        del before
        if is_smaller:
            gc.collect()  # modules and the methods that stand for theirs refer to each other

    def _hold(self, message: CallModule, module: HeldTextEncoder | HalfVae | None) -> HeldEncoder | HeldVae:
        """Returns what the call is of; what came with it is held from now on."""
        if module is not None:
            self._held.pop(message.module, None)
            self._held[message.module] = self._held_from(message.rank, module)
        found = self._held.get(message.module)
        if found is None or found.rank != message.rank:
            raise RequestError(f"the processes hold no text encoder or VAE {message.module}; send it first.")
        return found

    def _held_from(self, rank: int, module: HeldTextEncoder | HalfVae) -> HeldEncoder | HeldVae:
        world = self._layouts.world
        if isinstance(module, HalfVae):
            return HeldVae(module, world, self._groups, rank)
        if rank == ALL_RANKS:
            share_layers(module.module, self._layouts, lambda error: self._meeting.meet(error))
        return HeldEncoder(module.module, module.kind, world.device, rank)

    @torch.inference_mode()
    def _run(self, held: HeldEncoder, job: PickledJob) -> Tensors:
        work = job.work
        assert isinstance(work, EncoderCall), "samplers run elsewhere"
        with contextlib.ExitStack() as undo:
            undo.callback(setattr, held, "last_patcher", work.patcher)
            set_random_states(job.random_states, held.patcher.load_device)
            undo.enter_context(held.original.restored())
            make_changes(held.module, job.changes, undo, lambda kind: None)
            undo.callback(work.patcher.unpatch_model, unpatch_weights=False)
            if held.rank != ALL_RANKS:
                undo.enter_context(_cancellable(self._meeting.is_cancelled))
            return pack_tree(call_encoder(work.patcher, work.path, work.method, work.args, work.kwargs))


class _Meeting:
    """Where ranks meet after each layer that they share out. `has_ended`: all of them know that the call has failed or
    was cancelled."""

    def __init__(self, world: World, is_cancelled: Callable[[], bool]) -> None:
        self._world, self.is_cancelled = world, is_cancelled
        self._calls = itertools.count(1)
        self.has_ended = False

    def meet(self, error: Exception | None) -> None:
        """Raises `error`, and on the other ranks that one has failed; Cancelled on all of them."""
        is_stopped = self._world.rank == 0 and self.is_cancelled()
        try:
            self.has_ended = bool(
                agree_on_call(self._world, error is not None, next(self._calls), 0, int(is_stopped))
            )
        except RanksApart:
            self.has_ended = True
            if error is not None:
                raise error from None
            raise
        if self.has_ended:
            raise Cancelled("The request was cancelled.")


def _is_fault(error: Exception) -> bool:
    return is_out_of_memory(error) or is_device_failure(error)


@contextlib.contextmanager
def _cancellable(is_cancelled: Callable[[], bool]) -> Iterator[None]:
    """Inside, a call of any module ends a request that was cancelled."""
    looked = time.monotonic()

    def look(module: nn.Module, inputs: Any) -> None:
        nonlocal looked
        now = time.monotonic()
        if now - looked >= _LOOK:
            looked = now
            heartbeat.point("encode")
            if is_cancelled():
                raise Cancelled("The request was cancelled.")

    hook = nn.modules.module.register_module_forward_pre_hook(look)
    try:
        yield
    finally:
        hook.remove()
