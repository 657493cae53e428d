"""measure(): runs strategies on a model file in turns on warm ranks, and records every warm step for later choices."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack

import torch

from ...devices import is_cpu, machine_of
from ...errors import ParallelError, RequestError, StrategyError
from ...machine.fingerprint import cores, cpu_name
from ...machine.topology import Topology
from ...models.registry import inspect_model
from ...planner.history import MeasurementHistory
from ...planner.plan import job_from_request
from ...planner.workload.checkpoint_model import CheckpointModel
from ...planner.workload.fit import MemoryCheck
from ...planner.workload.workload import Job
from ...requests import WEIGHT_DTYPES, ModelSpec, Placement, SampleRequest
from ...sidecar.sidecar import Sidecar
from ...strategy import ParallelStrategy
from ...wire.calibration import ALL_TO_ALL, POINT_TO_POINT, Calibration, slowest_rate
from ..doctor.devices import machines_of, numbered, resolve_for_command
from ..doctor.parity import largest_difference
from ..doctor.rank_probe import random_request
from ..doctor.report import find_private, say_progress, scrub
from .candidates import (
    Layout,
    fit_side_by_side,
    layout_of,
    parse_strategies,
    possible_strategies,
    split_by_memory,
)
from .report import BenchResult, StrategyRow

_UNNAMED = ("", "all")


def measure(
    *,
    model: str,
    devices: str,
    width: int,
    height: int,
    text: int,
    steps: int,
    rounds: int,
    with_cfg: bool,
    batch: int = 1,
    strategies: str = "",
    engine: str = "auto",
    weight_dtype: str = "auto",
) -> BenchResult:
    """Measures the strategies; one that fails while it runs gets a row with the reason. Raises ParallelError for a
    file, a device or a requested strategy that cannot be measured at all."""
    if weight_dtype not in WEIGHT_DTYPES:
        raise RequestError(
            f"weight-dtype {weight_dtype!r} is unknown; choose one of {', '.join(WEIGHT_DTYPES)}."
        )
    file = inspect_model(model)
    names = resolve_for_command(devices)
    if is_cpu(names):
        # Each CPU rank gets the same number of cores in every strategy, also when it runs alone.
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores() // len(names))))
    request = random_request(
        file.inputs, width=width, height=height, batch=batch, text=text, steps=steps, with_cfg=with_cfg
    )
    job = job_from_request(CheckpointModel(file, weight_dtype), request)
    requested, left_out = _requested(strategies, job, names, engine)
    history = MeasurementHistory(names)
    spec = ModelSpec(model, weight_dtype=weight_dtype)
    rows, side_by_side, calibrations = run_rounds(
        requested, spec, request, job, history, engine=engine, rounds=rounds
    )
    rows += [StrategyRow(strategy, problem=reason) for strategy, reason in left_out.items()]
    private = find_private(numbered(names))
    for row in rows:
        row.problem = scrub(row.problem, private)
        row.memory_bytes = MemoryCheck.on(job, row.strategy, names).fullest.private_bytes
    stored = file.dtype if weight_dtype == "auto" else weight_dtype
    size = f"{width}x{height}" + (f", batch {batch}" if batch > 1 else "")
    return BenchResult(
        rows=tuple(rows),
        model=f"{file.describe()}, {stored}, {file.tensor_bytes / 1e9:.3g} GB",
        request=f"{size}, {'CFG' if with_cfg else 'no CFG'}, {text} text tokens, {steps} steps a run",
        hardware=_hardware(history.topology, names),
        software=history.fingerprint.software,
        rounds=rounds,
        interleaved=side_by_side,
        links=tuple(_links(c) for c in calibrations),
    )


def _requested(
    text: str, job: Job, devices: tuple[str, ...], engine: str
) -> tuple[Sequence[ParallelStrategy], dict[ParallelStrategy, str]]:
    """Returns (the strategies to run, the reason for each one left out). One that the user names runs even if it may
    not fit."""
    if text.strip().lower() in _UNNAMED:
        every = possible_strategies(job, devices, engine=engine, fewer=bool(text.strip()))
        return split_by_memory(every, job, devices)
    requested = parse_strategies(text)
    for strategy in requested:
        if strategy.cfg_degree > 1 and not job.has_cfg:
            raise StrategyError(f"{strategy.describe()} splits two prompts; add --cfg on, or leave it out.")
        if strategy.data_degree > job.batch:
            raise StrategyError(
                f"{strategy.describe()} splits images; give --batch {strategy.data_degree} or more."
            )
        strategy.check(job.model.shape, len(devices), engine)
    return requested, {}


def _hardware(topology: Topology, devices: tuple[str, ...]) -> tuple[str, ...]:
    if machines := machines_of(devices):
        counts = [str(sum(machine_of(device) == machine for device in devices)) for machine in machines]
        what = "processes on the CPU" if is_cpu(devices) else "GPUs"
        return (f"{len(machines)} machine(s) of a cluster, {' + '.join(counts)} {what}",)
    if topology.devices:
        return (topology.describe().rstrip("."), f"{cores()} cores ({cpu_name()})")
    if not is_cpu(devices):
        # NVML lists these GPUs under other names than CUDA, e.g. older names of MIG slices.
        return (f"{len(devices)} GPUs, of which nobody tells more", f"{cores()} cores ({cpu_name()})")
    return (
        f"no GPU, gloo on {cores()} cores ({cpu_name()})",
        f"{os.environ['OMP_NUM_THREADS']} thread(s) a process",
    )


def _links(ranks: tuple[Calibration, ...]) -> str:
    parts = [f"{ranks[0].strategy.describe()} ({ranks[0].backend})"]
    for kind, label in ((ALL_TO_ALL, "all-to-all"), (POINT_TO_POINT, "ring")):
        if (rate := slowest_rate(ranks, kind)) is not None:
            parts.append(f"{label} {rate / 1e9:.3g} GB/s a process")
    parts.append(f"tiny all-reduce {max(c.collective_s for c in ranks) * 1e6:.0f} us")
    return ", ".join(parts)


def run_rounds(
    strategies: Sequence[ParallelStrategy],
    spec: ModelSpec,
    request: SampleRequest,
    job: Job,
    history: MeasurementHistory,
    *,
    engine: str,
    rounds: int,
) -> tuple[list[StrategyRow], bool, list[tuple[Calibration, ...]]]:
    """Returns (a row per strategy, True if all took turns, the calibration of each strategy on several devices).
    A strategy that fails gets a row with the problem and does not stop the others. `job`: of `request`; `rounds`: runs
    that count, after one warm-up run."""
    side_by_side = fit_side_by_side(strategies, job, history.devices)
    rows = {s: StrategyRow(s) for s in strategies}
    calibrations: list[tuple[Calibration, ...]] = []
    reference: torch.Tensor | None = None
    layouts = dict.fromkeys(map(layout_of, strategies))
    blocks = [[s for s in strategies if layout_of(s) == layout] for layout in layouts]
    for block in [strategies] if side_by_side else blocks:  # the strategies of a block take turns
        with ExitStack() as stack:
            groups: dict[Layout, Sidecar] = {}
            for s in block:
                if layout_of(s) not in groups:
                    groups[layout_of(s)] = Sidecar(history.devices[: s.world_size])
                    stack.callback(groups[layout_of(s)].stop)
            for turn in range(rounds + 1):
                for s in block:
                    if rows[s].problem:
                        continue
                    sidecar, placement = groups[layout_of(s)], Placement(s, engine)
                    say_progress(f"{f'round {turn} of {rounds}' if turn else 'warming up'}: {s.describe()}")
                    try:
                        result = sidecar.sample(spec, request, placement)
                        if turn == 0 and s.world_size > 1:
                            calibrations.append(sidecar.calibrate(placement))
                    except ParallelError as error:
                        lines = str(error).strip().splitlines() or [type(error).__name__]
                        rows[s].problem = lines[0].strip()
                        continue
                    if turn == 0:
                        reference = result.latent if reference is None else reference
                        rows[s].difference = largest_difference(result.latent, reference)
                    else:
                        rows[s].add_run(result.info)
                        history.record(job, result.info)
    return [rows[s] for s in strategies], side_by_side, calibrations
