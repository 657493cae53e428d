"""What this machine has seen: remembers step times of runs, and chooses a strategy by all that was measured."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from ..devices import is_cpu
from ..errors import RequestError
from ..models.flux.checkpoint import FluxFile
from ..options import DEFAULT_COMPUTE, ComputeOptions
from ..requests import ModelSpec, RunInfo, SampleRequest
from .candidate_table import outlooks_of
from .cost.communication import Candidate, Work
from .cost.machine import AutoAdvice, choose_here, flux_work, model_machine, neighbours_first
from .cost.model import DEFAULT, Machine, fixed_seconds
from .history.records import (
    Kind,
    Measurements,
    WorkKey,
    calibration_of,
    measured,
    model_key,
    one_gpu_step,
    record,
    warm_step,
)
from .history.store import MeasurementStore
from .machine.cards import Card, Interconnect
from .machine.fingerprint import device_ids, device_key, take_fingerprint
from .machine.probe import read_topology
from .machine.topology import Topology
from .ranking import Ranking, choose

PIXELS_PER_LATENT = 8
_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1}
# Model calls in a step, where it is not one.
CALLS = {"heun": 2}

log = logging.getLogger(__name__)


class MeasurementHistory:
    """The measurements of a set of devices. `devices`: names in rank order; `topology`: what this process can see."""

    def __init__(
        self, devices: Sequence[str], topology: Topology | None = None, store: MeasurementStore | None = None
    ) -> None:
        self._devices = tuple(devices)
        seen = _visible() if topology is None else topology
        self._ids = device_ids(self._devices, seen)
        known = {device.uuid for device in seen.devices}
        self._topology = (
            Topology((), source="none")
            if is_cpu(self._devices)
            else seen.select([uuid for uuid in self._ids if uuid in known])
        )
        self.fingerprint = take_fingerprint(Topology((), source="none") if is_cpu(self._devices) else seen)
        self._store = store or MeasurementStore(self.fingerprint)

    @property
    def ids(self) -> tuple[str, ...]:
        """What tells these devices from others; only digests of it are kept."""
        return self._ids

    @property
    def store(self) -> MeasurementStore:
        return self._store

    def remember(
        self,
        spec: ModelSpec,
        file: FluxFile,
        work: Work,
        info: RunInfo,
        *,
        sampler: str = "euler",
        compute_options: ComputeOptions = DEFAULT_COMPUTE,
    ) -> bool:
        """Keeps the median warm step of a run on the first of these devices; whether it reached the disk.

        `computing`: what was asked for; a run whose blocks were not compiled after all counts as uncompiled.
        """
        if info.compiled is None:
            compute_options = replace(compute_options, compile="off")
        seconds = warm_step(info.step_seconds)
        if seconds is None or info.reused_calls:  # steps that skip blocks tell nothing of those that do not
            return False
        kind = Kind(
            model=_model(spec, file, compute_options),
            work=WorkKey.of(work, CALLS.get(sampler, 1)),
            strategy=info.strategy,
            engine=info.engine,
            devices=device_key(self._ids[: info.strategy.world_size]),
        )
        return self._store.update(lambda known: record(known, kind, seconds, time.time()))

    def choose(
        self,
        spec: ModelSpec,
        file: FluxFile,
        work: Work,
        *,
        sampler: str = "euler",
        engine: str = "auto",
        approximation: str = "if_needed",
        memory_of: Callable[[Candidate], float] | None = None,
        compute_options: ComputeOptions = DEFAULT_COMPUTE,
    ) -> AutoAdvice:
        """The best strategy for `work` on these devices or the first few of them, by measurements and predictions.

        `choice` is None where the rule must decide: an unknown card, or a CPU on which one rank and several have not
        both been seen at this work.
        """
        known, now = self._store.read(), time.time()
        about = {
            "model": _model(spec, file, compute_options),
            "devices": self._ids,
            "now": now,
            "engine": "xfuser" if engine == "xfuser" else "native",
        }
        calls = CALLS.get(sampler, 1)
        if is_cpu(self._devices):
            seen = measured(known, work, calls=calls, **about)
            found = _among_measured(seen, work, len(self._devices), memory_of)
            if found.choice is None and compute_options.compiles:  # compare them uncompiled, as trials do
                about["model"] = _model(spec, file, replace(compute_options, compile="off"))
                seen = measured(known, work, calls=calls, **about)
                found = _among_measured(seen, work, len(self._devices), memory_of)
            return found
        try:
            machine, _ = model_machine(self._topology)
        except RequestError as error:
            return AutoAdvice(None, (str(error),))
        seen = measured(known, work, calls=calls, fixed_s=fixed_seconds(work, machine.card), **about)
        return choose_here(
            work,
            file.shape,
            self._topology,
            engine=engine,
            one_gpu_s=one_gpu_step(known, work, **about),
            measured=seen,
            mode="compiled" if compute_options.compiles else "eager",
            calibrations=self._newest_calibration(known, now),
            approximation=approximation,
            memory_of=memory_of,
        )

    def _newest_calibration(self, known: Measurements, now: float):
        """Of a strategy over all of these devices, whichever was measured last."""
        key = device_key(self._ids)
        mine = [c for c in known.calibrated if c.devices == key]
        newest = max(mine, key=lambda c: c.at, default=None)
        if newest is None:
            return ()
        return calibration_of(known, self._ids, newest.ranks[0].strategy, now) or ()


def work_of(file: FluxFile, request: SampleRequest, weight_dtype: str = "auto") -> Work:
    """The job of a request with a Flux file, for the cost model. `weight_dtype`: as in ModelSpec."""
    work = image_work(
        file,
        request.noise.shape,
        text=request.positive.context.shape[1],
        has_cfg=len(request.prompts) == 2,
        steps=len(request.sigmas) - 1,
        weight_dtype=weight_dtype,
    )
    return replace(work, step_cache=request.cache_threshold > 0)


def image_work(
    file: FluxFile,
    latent_shape: Sequence[int],
    *,
    text: int,
    has_cfg: bool,
    steps: int,
    weight_dtype: str = "auto",
) -> Work:
    """The job of denoising latents [B, C, H/8, W/8]. `text`: tokens of the prompt."""
    batch, _, height, width = latent_shape
    return flux_work(
        file.dims,
        file.tensor_bytes * _BYTES.get(weight_dtype, _BYTES[file.dtype]) // _BYTES[file.dtype],
        width=width * PIXELS_PER_LATENT,
        height=height * PIXELS_PER_LATENT,
        text=text,
        batch=batch,
        has_cfg=has_cfg,
        steps=steps,
    )


def remember(
    devices: Sequence[str],
    spec: ModelSpec,
    file: FluxFile,
    work: Work,
    info: RunInfo,
    sampler: str = "euler",
    compute_options: ComputeOptions = DEFAULT_COMPUTE,
) -> None:
    """Experience.remember, which never costs a finished picture: whatever fails is only logged."""
    try:
        MeasurementHistory(devices).remember(
            spec, file, work, info, sampler=sampler, compute_options=compute_options
        )
    except Exception:
        log.debug("a run's step times are not kept", exc_info=True)


def in_good_order(devices: Sequence[str]) -> tuple[str, ...]:
    """The same devices with well-joined ones next to each other, where ranks exchange most."""
    if is_cpu(devices) or len(devices) < 3:
        return tuple(devices)
    seen = _visible()
    uuids = device_ids(devices, seen)
    if not set(uuids) <= {device.uuid for device in seen.devices}:
        return tuple(devices)
    names = dict(zip(uuids, devices, strict=True))
    return tuple(names[uuid] for uuid in neighbours_first(seen.select(uuids)))


def _among_measured(
    seen: Mapping[Candidate, float], work: Work, count: int, memory_of: Callable[[Candidate], float] | None
) -> AutoAdvice:
    """The choice on a CPU, which has no data sheet: the fastest that was seen, once one rank and several were."""
    alone = seen.get(Candidate())
    if alone is None or len(seen) < 2:
        return AutoAdvice(None, ("On the CPU only a measurement tells; `bench` takes it.",))
    # What the model needs to be asked at all; every candidate is measured, so nothing of it decides.
    rate = work.flop * work.steps / alone / 1e12 / DEFAULT.compiled
    machine = Machine(Card("CPU", rate, memory=1e6, bandwidth=1e6), Interconnect("gloo", "host", 10.0), count)
    choice = choose(seen, work, machine, measured=seen, mode="compiled", memory_of=memory_of)
    outlooks = outlooks_of(choice, work.steps, fixed_s=0.0)
    return AutoAdvice(replace(choice, reason=_measured_reason(choice, work)), (), outlooks)


def _measured_reason(choice: Ranking, work: Work) -> str:
    ordered = [choice.best, *sorted(choice.ranked[1:], key=lambda e: e.seconds)]
    times = ", ".join(f"{e.candidate.describe()} {e.seconds / work.steps:.3g} s" for e in ordered[:4])
    name = choice.best.candidate.describe()
    return f"{name} on the CPU: measured before, a step takes {times}."


def _model(spec: ModelSpec, file: FluxFile, compute_options: ComputeOptions) -> str:
    # The dtype that ranks compute in follows from these and the device.
    return model_key(file.dims, file.tensor_bytes, spec.weight_dtype, compute_options)


@functools.cache
def _visible() -> Topology:
    """Read once: devices do not change while a process lives, and NVML takes a while."""
    return read_topology().visible()
