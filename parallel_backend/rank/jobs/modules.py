"""The text encoders and VAEs that a rank holds: ComfyUI's own modules, called as ComfyUI's process calls them."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from ...engine.comm.groups import Layouts, World
from ...engine.shared_layers import share_layers
from ...errors import Cancelled, ParallelError
from ...job.answer_tree import pack_tree
from ...job.payload import INPUTS, EncoderCall, HalfVae, HeldTextEncoder, PickledJob, VaeCall
from ...job.restore import set_replaced
from ...job.torch_settings import computing_with
from ...job.unpickling import unpack_payload
from ...models.comfyui.jobs.patchers import encoder_patcher
from ...models.comfyui.jobs.samplers import call_encoder
from ...requests import ComfyUISource, LoadInfo
from ...wire.heartbeat import heartbeat
from ...wire.payloads import Tensors
from ...wire.protocol import ALL_RANKS, Load, RankCall
from ..outcome.agreement import RanksApart, agree, agree_on_call, leave
from ..outcome.errors import as_refusal, is_fault
from .reader import JobReader, PatchedModel
from .set_up import set_up
from .vaes import HeldVae, StepCallback

_LOOK = 0.05  # s between two checks for a cancel


class HeldEncoder(PatchedModel):
    """A text encoder that a rank holds. `rank`: the one that computes it, ALL_RANKS if its layers are shared out;
    `computes`: True if this rank computes."""

    def __init__(self, module: nn.Module, kind: type, world: World, rank: int) -> None:
        super().__init__(encoder_patcher(kind, module, world.device))
        self.rank, self.computes = rank, rank in (world.rank, ALL_RANKS)

    def info(self, seconds: float, device: torch.device) -> LoadInfo:
        """Returns the record of its load, which took `seconds`. Its bytes are the weights that this rank computes with;
        ComfyUI's patcher moves them to the device when the encoder is called."""
        size = sum(weight.nbytes for weight in self.base.parameters()) if self.computes else 0
        return LoadInfo(seconds, size, cached=False, dtype="", compute_dtype="", device_bytes=size)


class Modules:
    """Loads text encoders and VAEs, and runs jobs over them."""

    def __init__(
        self, layouts: Layouts, reader: JobReader, import_comfyui: Callable[[ComfyUISource], None]
    ) -> None:
        self._layouts, self._reader, self._import = layouts, reader, import_comfyui
        self._meeting = _Meeting(layouts.world, lambda: False)  # of the current call

    def load(self, message: Load, tensors: Tensors) -> HeldEncoder | HeldVae:
        """Returns the module in the payload, ready for calls. Raises ParallelError, or an error of memory or device,
        on this rank alone."""
        assert message.comfyui is not None, "it says whose module it is"
        self._import(message.comfyui)
        module = self._reader.read(*unpack_payload(tensors, stay_shared=True), None).work
        if isinstance(module, HalfVae):
            return HeldVae(module, self._layouts)
        assert isinstance(module, HeldTextEncoder), "nothing else is loaded so"
        try:
            if message.rank == ALL_RANKS:
                share_layers(module.module, self._layouts, lambda error: self._meeting.meet(error))
            return HeldEncoder(module.module, module.kind, self._layouts.world, message.rank)
        except Exception as failure:
            if isinstance(failure, ParallelError) or is_fault(failure):
                raise
            raise as_refusal(failure) from failure

    def run(
        self, held: HeldEncoder | HeldVae, tensors: Tensors, on_step: StepCallback
    ) -> tuple[Tensors | None, RankCall]:
        """Runs a job; returns its answer, None on all ranks but one, and its record. Collective."""
        started, world = time.perf_counter(), self._layouts.world
        self._meeting = _Meeting(world, on_step.is_cancelled)
        inputs = tensors.pop(INPUTS, None)
        error: Exception | None = None
        with contextlib.ExitStack() as undo:
            try:
                job = self._reader.read(*unpack_payload(tensors), held)
                if isinstance(held, HeldVae):
                    undo.enter_context(computing_with(job.settings))
                    set_replaced(job.replaced, self._reader.packages.find_module, undo)
                    assert isinstance(job.work, VaeCall), "a VAE is called with one"
                    inputs = held.check_call(inputs, job.work.shares)
            except Exception as failure:
                error = failure
            agree(world, error)
            if isinstance(held, HeldEncoder):
                return self._call_encoder(held, job, started)
            if not held.is_checked:
                try:
                    held.check()
                except Exception as failure:
                    error = failure
                agree(world, error)  # if it fails on one rank, all ranks check again with the next call
                held.is_checked = True
            assert inputs is not None and isinstance(job.work, VaeCall), "the call was checked"
            answer, record = held.call(inputs, job.work.shares, on_step)
            return None if answer is None else pack_tree(answer), record

    def _call_encoder(
        self, held: HeldEncoder, job: PickledJob, started: float
    ) -> tuple[Tensors | None, RankCall]:
        world, traffic = self._layouts.world, self._layouts.traffic
        sent = traffic.bytes_sent
        error: Exception | None = None
        answer: Tensors | None = None
        notes: tuple[str, ...] = ()
        try:
            if held.computes:
                answer, notes = self._run(held, job)
        except Exception as failure:
            error = failure if is_fault(failure) else as_refusal(failure)
        if not self._meeting.has_ended:
            leave(world, error)
        elif error is not None:
            raise error
        record = RankCall(time.perf_counter() - started, traffic.bytes_sent - sent, notes=notes)
        return (answer if world.rank == max(held.rank, 0) else None), record

    @torch.inference_mode()
    def _run(self, held: HeldEncoder, job: PickledJob) -> tuple[Tensors, tuple[str, ...]]:
        """Returns the answer with what the call has changed for later jobs, and notes."""
        work = job.work
        assert isinstance(work, EncoderCall), "samplers run elsewhere"
        with set_up(job, held, self._reader.packages.find_module) as collect:
            with contextlib.ExitStack() as undo:
                undo.callback(work.patcher.unpatch_model, unpatch_weights=False)
                if held.rank != ALL_RANKS:
                    undo.enter_context(_cancellable(self._meeting.is_cancelled))
                answer = call_encoder(work.patcher, work.path, work.method, work.args, work.kwargs)
            changes, notes = collect()
            return {**pack_tree(answer), **changes}, notes


class _Meeting:
    """The agreement of all ranks after each layer that they share out. `has_ended`: True once all ranks know that the
    call has failed or was cancelled."""

    def __init__(self, world: World, is_cancelled: Callable[[], bool]) -> None:
        self._world, self.is_cancelled = world, is_cancelled
        self._calls = itertools.count(1)
        self.has_ended = False

    def meet(self, error: Exception | None) -> None:
        """Raises `error`, RanksApart on the ranks without an error, or Cancelled on all ranks. Collective."""
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


@contextlib.contextmanager
def _cancellable(is_cancelled: Callable[[], bool]) -> Iterator[None]:
    """Within this context, the call of any module raises Cancelled if the request was cancelled."""
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
