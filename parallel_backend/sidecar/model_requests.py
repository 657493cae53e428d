"""The requests that compute with the model that the ranks hold: a whole sampling job, and one model call."""

from __future__ import annotations

import collections
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..errors import TransportError
from ..options import CompileStats
from ..requests import (
    InputShapes,
    LoadInfo,
    ModelSpec,
    Placement,
    PredictRequest,
    RunInfo,
    SampleRequest,
    SampleResult,
)
from ..wire import deadlines
from ..wire.payloads import Tensors, check_inputs, predict_tensors
from ..wire.protocol import Done, Message, Predict, Progress, Sample
from ..wire.weight_patches import WeightPatches
from .compile_progress import CompileWatch
from .events import Stepped, emit
from .exchange import Exchange, expect, reports
from .holdings import RankHoldings
from .lease import Lease
from .phases import Phase, PhaseKind
from .resume import SamplingJob

_STEPS_SHOWN = 60  # whose times a status has


@dataclass
class StepProgress:
    """The progress of the sampling job that runs: its step, and how long its latest ones took, in seconds."""

    step: int = 0
    steps: int = 0
    seconds: collections.deque[float] = field(default_factory=lambda: collections.deque(maxlen=_STEPS_SHOWN))

    def end(self) -> None:
        """No job runs; the times of its steps stay."""
        self.step = self.steps = 0


class ModelRequests:
    """Of one sidecar. Each method runs on ranks that are leased, and makes them hold the model first."""

    def __init__(self, holdings: RankHoldings, devices: tuple[str, ...]) -> None:
        self._holdings = holdings
        self._devices = devices
        self.progress = StepProgress()

    def sample(
        self,
        spec: ModelSpec,
        job: SamplingJob,
        message: Sample,
        patches: WeightPatches,
        lease: Lease,
    ) -> SampleResult:
        """The job from where it is to its end."""
        strategy = message.placement.strategy
        load, _ = self._ensure_ready(spec, job.request, message.placement, patches, lease)
        seconds: list[float] = []
        sampling = False
        compiling = CompileWatch(job.shape, lease.on_phase)
        held = self._holdings.held
        assert held is not None, "ensure_ready has loaded it"

        def on_message(rank: int, answer: Message, tensors: Tensors | None) -> None:
            nonlocal sampling
            if compiling.took(answer):
                sampling = False
                return
            step = expect(rank, answer, Progress)
            seconds.append(step.seconds)
            self.progress.step, self.progress.steps = step.step, step.steps
            self.progress.seconds.append(step.seconds)
            if not sampling:
                sampling = True
                lease.on_phase(Phase(PhaseKind.SAMPLING))
            emit(Stepped(self._devices, step.step, step.steps, step.seconds, strategy))
            job.take(step, tensors)

        exchange = lease.exchange()
        self.progress.seconds.clear()
        exchange.send(message, job.begin(held.identity))
        exchange.guard(lambda: lease.on_phase(Phase(PhaseKind.FIRST_STEP)))

        def budget() -> float:  # steps whose model calls a cache answered are no measure for the others
            steps = [max(seconds)] if message.cache_threshold and seconds else seconds
            return compiling.budget(deadlines.step_budget(steps))

        done = exchange.wait(budget, on_message)
        result = _result(exchange, {"latent": job.shape, "step_seconds": None})
        info = _run_info(done, load, step_seconds=tuple(result["step_seconds"].tolist()))
        return SampleResult(latent=result["latent"], info=job.merged(info))

    def predict(
        self,
        spec: ModelSpec,
        request: PredictRequest,
        placement: Placement,
        patches: WeightPatches,
        lease: Lease,
    ) -> tuple[Tensor, RunInfo]:
        """As Sidecar.predict."""
        load, inputs = self._ensure_ready(spec, request, placement, patches, lease)
        prompts = self._holdings.prompts
        key, is_new = prompts.find(request.conditioning)
        times = self._holdings.call_seconds[placement, tuple(request.x.shape)]
        try:
            tensors = predict_tensors(request, with_conditioning=is_new)
            exchange = lease.exchange()
            exchange.send(Predict(placement, conditioning=key, forget=prompts.take_forgotten()), tensors)
            compiling = CompileWatch(request.x.shape, lease.on_phase)

            def on_message(rank: int, answer: Message, tensors: Tensors | None) -> None:
                if not compiling.took(answer):
                    expect(rank, answer, Done)

            done = exchange.wait(lambda: compiling.budget(deadlines.step_budget(times)), on_message)
            velocity = _result(exchange, {"velocity": inputs.velocity_shape(request.x)})["velocity"]
        except BaseException:
            if is_new:  # who knows whether the ranks have it
                prompts.drop(key)
            raise
        seconds = reports(done, lambda answer: answer.run)[0].seconds
        times.append(seconds)
        return velocity, _run_info(done, load, step_seconds=(seconds,))

    def _ensure_ready(
        self,
        spec: ModelSpec,
        request: SampleRequest | PredictRequest,
        placement: Placement,
        patches: WeightPatches,
        lease: Lease,
    ) -> tuple[LoadInfo, InputShapes]:
        """The model is held and takes what `request` has: on the ranks, another width would only be an error of torch
        half-way through a collective."""
        load = self._holdings.ensure_ready(spec, placement.strategy, patches, lease)
        if load.inputs is None:
            raise TransportError("the ranks loaded a model without saying what it takes")
        check_inputs(request, load.inputs)
        return load, load.inputs


def _result(exchange: Exchange[Done], shapes: dict[str, tuple[int, ...] | None]) -> Tensors:
    """Rank 0's tensors, named and shaped as they must be (None: any shape); those with a shape are float32."""
    result = exchange.result
    found = {name: tuple(tensor.shape) for name, tensor in result.items()}
    fits = set(result) == set(shapes) and all(
        shape is None or (found[name], result[name].dtype) == (shape, torch.float32)
        for name, shape in shapes.items()
    )
    if not fits:
        raise exchange.refuse(f"rank 0 answered with the tensors {found}; expected {shapes}, float32")
    return result


def _run_info(done: list[Done], load: LoadInfo, step_seconds: tuple[float, ...]) -> RunInfo:
    runs = reports(done, lambda answer: answer.run)
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
        load=load,
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
