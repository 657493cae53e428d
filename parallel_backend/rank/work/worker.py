"""The requests that one rank serves: hold models, run jobs, and check itself."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, TypeVar, cast

import torch

from ...devices import machine_of
from ...engine.comm.groups import Layouts, World
from ...errors import RequestError, TransportError
from ...options import AUTO
from ...requests import (
    ComfyUISource,
    FileContent,
    LoadInfo,
    ModelSpec,
    Placement,
    RunInfo,
)
from ...strategy import ParallelStrategy
from ...wire.heartbeat import heartbeat
from ...wire.payloads import Tensors, sample_request
from ...wire.protocol import (
    Calibrate,
    Done,
    KeepModels,
    Load,
    Message,
    MoveOut,
    Prepare,
    ProveClasses,
    RankCall,
    RunCheck,
    RunJob,
    Setup,
    TakeBack,
)
from ..outcome.agreement import worst_outcome
from ..outcome.errors import PeerFailed, is_out_of_memory
from ..outcome.progress import RequestLink
from .device import MemoryMeter, device_of
from .held_models import HeldModel, HeldModels, collect, import_for
from .run_record import run_record
from .step_boundary import StepBoundary

if TYPE_CHECKING:  # imported when they are first needed: they take seconds
    from ...engine.module_forward import ModuleForward
    from ...models.base import ModuleModel
    from ..jobs.modules import HeldEncoder, Modules
    from ..jobs.reader import JobReader
    from ..jobs.vaes import HeldVae
    from .job import Jobs

OnCompile = Callable[[], None]
Found = TypeVar("Found")

_GOOD, _NO_MEMORY, _REFUSED = 0, 1, 2  # outcomes of a load; a higher number is worse


class RankWorker:
    """Serves the requests of one rank, and keeps its process groups and models between them."""

    def __init__(self, setup: Setup) -> None:
        """Joins the process group; blocks until all ranks have."""
        if setup.deterministic:
            torch.use_deterministic_algorithms(True, warn_only=True)  # as ComfyUI does
        self.world = World(
            rank=setup.rank,
            world_size=len(setup.devices),
            device=device_of(setup.devices[setup.rank]),
            backend="nccl" if all(name.startswith("cuda") for name in setup.devices) else "gloo",
            store_path=setup.rendezvous,
            devices=tuple(device_of(name) for name in _seen_from(setup)),
        )
        self.models = HeldModels(self.world.device)
        self._layouts = Layouts(self.world)
        self.meter = MemoryMeter(self.world.device, lambda: self._layouts.traffic.bytes_sent)

    def answer(self, message: Message, tensors: Tensors, request: RequestLink) -> tuple[Done, Tensors | None]:
        """Serves one request; returns its terminal message and, on one rank, the tensors of the result."""
        match message:
            case Load():
                return Done(load=self.load(message, tensors), models=self.models.report()), None
            case RunJob():
                on_step = StepBoundary(
                    request,
                    control=self.world.control,
                    device=self.world.device,
                    steps=message.steps,
                    previews=message.previews,
                    meter=self.meter,
                )
                run = self.run_job if message.cfg is None else self.run_plain_job
                answer, record = run(message, tensors, on_step, request.report_compiling)
                if isinstance(record, RankCall):
                    return Done(call=record), answer
                return Done(run=record), answer
            case Prepare():
                import_for(message.spec, self.world.device, holds_nothing=not len(self.models))
                return Done(), None
            case ProveClasses():
                from ..checks.module_parity import prove_all

                return Done(proofs=prove_all(message.comfyui, message.names)), None
            case Calibrate():
                from ..checks.calibrate import calibrate

                layout = self._layouts.get(message.strategy)
                return Done(calibration=calibrate(self.world, layout, message)), None
            case RunCheck():
                from ..checks.gpu import run_check

                return Done(findings=tuple(run_check(message, self._layouts))), None
            case KeepModels():
                self.models.keep(message.models)
                self._record_weights()
            case MoveOut():
                self.move_out(message)
            case TakeBack():
                self.take_back()
            case _:
                raise TransportError(f"{type(message).__name__} is not a request")
        return Done(models=self.models.report()), None

    def load(self, message: Load, tensors: Tensors) -> LoadInfo:
        """Loads one more model, on every rank or on none.

        All ranks agree on the outcome. If one runs out of memory, all drop the models to keep, one by one, until the
        new one fits; but not if `message.yields`.
        """
        started, device = time.perf_counter(), self.world.device
        self.models.keep(message.keep)
        spec = None if message.spec is None else self._locate(message.spec, message.content)

        def attempt() -> HeldModel | HeldEncoder | HeldVae:
            heartbeat.point("load")
            heartbeat.loading(0.0)
            held = (
                self.modules.load(message, dict(tensors))
                if spec is None
                else self._read_held(spec, message.strategy)
            )
            heartbeat.loading(1.0)
            return held

        least = len(self.models) if message.yields else 0
        try:
            held = self._on_all(attempt, "another process could not load the model", least)
        except Exception:
            collect(device)
            self._record_weights()
            raise
        self.models.add(message.model, held)
        self._record_weights()
        return held.info(time.perf_counter() - started, device)

    def _locate(self, spec: ModelSpec, content: FileContent | None) -> ModelSpec:
        """Returns `spec` with the path on this machine: unchanged on ComfyUI's computer. Collective elsewhere."""
        return spec

    def run_plain_job(
        self, message: RunJob, tensors: Tensors, on_step: StepBoundary, on_compile: OnCompile
    ) -> tuple[Tensors | None, RunInfo]:
        """Runs a job that needs no ComfyUI. Returns as `run_job`."""
        from .plain_job import PlainJob

        assert message.cfg is not None and message.placement is not None, "the sidecar gives both"
        request = sample_request(message.cfg, tensors)
        held, placement = self.models.of_file(message.model), message.placement
        held.begin_request()
        forward = _watched(self._forward(held, placement), on_compile)
        sent = forward.bytes_sent
        job = PlainJob(forward, request)
        latent = job.run(on_step)
        on_step.finish()
        result = {
            "latent": latent.float(),
            "step_seconds": torch.tensor(on_step.seconds, dtype=torch.float64),
        }
        run = run_record(forward, placement, sent, on_step, job.notes, is_exact=job.is_exact)
        return (result if self.world.rank == 0 else None), run

    @torch.inference_mode()
    def run_job(
        self, message: RunJob, tensors: Tensors, on_step: StepBoundary, on_compile: OnCompile
    ) -> tuple[Tensors | None, RunInfo | RankCall]:
        """Runs a job of ComfyUI's process; returns (answer, record), with the answer on one rank, None on others.
        `on_compile` is called before parts of the model are compiled."""
        held, placement = self.models.get(message.model), message.placement
        if not isinstance(held, HeldModel):
            found = self.modules.run(held, tensors, on_step)
            self.meter.publish()
            return found
        if placement is None or not hasattr(held.model, "patcher"):
            raise RequestError("the processes hold no model of ComfyUI's; load one first.")

        held.begin_request()

        def forward_under(strategy: ParallelStrategy) -> ModuleForward:
            return self._forward(held, replace(placement, strategy=strategy))

        _watched(forward_under(placement.strategy), on_compile)
        answer, run = self._jobs.run(held, message, tensors, on_step, forward_under)
        return (answer if self.world.rank == 0 else None), run

    @cached_property
    def _jobs(self) -> Jobs:
        from .job import Jobs

        return Jobs(self._layouts, self._reader)

    @cached_property
    def modules(self) -> Modules:
        from ..jobs.modules import Modules

        return Modules(self._layouts, self._reader, self._import_comfyui)

    @cached_property
    def _reader(self) -> JobReader:
        from ..jobs.reader import JobReader

        return JobReader(self.world)

    def _import_comfyui(self, source: ComfyUISource) -> None:
        from ...models.comfyui.environment import import_comfyui

        import_comfyui(source, self.world.device)

    def move_out(self, message: MoveOut) -> None:
        """Moves a model off the device of one rank. Collective: every rank takes part in the agreement."""
        if message.rank == self.world.rank:
            self.models.of_file(message.model).move_out(self.world.device)
        self._move(torch.device("cpu"), is_waking=False)
        self._record_weights()

    def take_back(self) -> None:
        """Moves the weights that `move_out` moved back to the device, bit for bit. Collective."""
        self._move(self.world.device, is_waking=True)
        for _, held in self.models:
            held.moved_out = []
        self._record_weights()

    def _record_weights(self) -> None:
        self.meter.record_weights(self.models.chunks)

    def _move(self, device: torch.device, *, is_waking: bool) -> None:
        """Moves the chunks in `moved_out` to `device`, on every rank. If one runs out of memory, all ranks drop one
        model after the other. If the last one does not fit, or on another error, drops all and raises the error."""
        try:
            self._on_all(
                partial(self._move_here, device, is_waking), "another process could not move its weights", 1
            )
        except Exception:
            self.models.keep(())
            raise
        collect(self.world.device)

    def _move_here(self, device: torch.device, is_waking: bool) -> None:
        for _, held in self.models:
            if held.moved_out and is_waking:
                held.model.come_back()
            for chunk in held.moved_out:
                chunk.to(device)

    def _forward(self, held: HeldModel, placement: Placement) -> ModuleForward:
        """Returns the cached forward of a held model under `placement`. Collective if it is new: all ranks raise an
        error if one lacks the attention kernel, so that none waits for it."""
        from ...engine.attention.kernel_choice import kernel_for
        from ...engine.module_forward import make_module_forward

        if placement not in held.forwards:
            wish, ring = placement.compute_options.attention, placement.strategy.ring_degree > 1
            if wish != AUTO:
                choose = partial(kernel_for, self.world.device, held.model.compute_dtype, wish, ring=ring)
                self._on_all(choose, "another process lacks the attention kernel")
            held.forwards[placement] = make_module_forward(held.model, self._layouts, placement)
        return held.forwards[placement]

    def _read_held(self, spec: ModelSpec, strategy: ParallelStrategy) -> HeldModel:
        import_for(spec, self.world.device, holds_nothing=not len(self.models))
        return HeldModel(self._read_model(spec, strategy))

    def _read_model(self, spec: ModelSpec, strategy: ParallelStrategy) -> ModuleModel:
        from ...engine.load import load_under

        return load_under(spec, self._layouts, strategy)

    def _on_all(self, attempt: Callable[[], Found], failed: str, least: int | None = None) -> Found:
        """Returns what `attempt` returns, if no rank fails. While one runs out of memory, all drop one model after the
        other and try again, until they hold `least` models; None for never. Raises this rank's error, or PeerFailed
        with the words `failed`. Collective."""
        while True:
            found, error = None, None
            try:
                found = attempt()
            except Exception as failure:  # a rank that fails must still take part in the agreement
                error = failure
            mine = _GOOD if error is None else _NO_MEMORY if is_out_of_memory(error) else _REFUSED
            worst = worst_outcome(self.world, mine, "load")
            if worst == _GOOD:
                return cast(Found, found)
            found = None
            if worst != _NO_MEMORY or least is None or len(self.models) <= least:
                raise error or PeerFailed(failed)
            error = None  # it holds what did not fit
            self.models.drop_first()


def _seen_from(setup: Setup) -> tuple[str, ...]:
    """Returns the devices of all ranks. Those of other machines cannot be inspected from here, so they are assumed to
    be of the same kind as this rank's own."""
    local = setup.devices[setup.rank]
    return tuple(name if machine_of(name) == machine_of(local) else local for name in setup.devices)


def _watched(forward: ModuleForward, on_compile: OnCompile) -> ModuleForward:
    """Returns the forward; from now on `on_compile` is called before it compiles, and compilations are counted."""
    if forward.compiles:
        from ...engine.blocks.compile import compiler

        compiler().on_begin = on_compile
        compiler().take()  # discards the counts of a request that failed or was cancelled
    return forward
