"""measure(): from a file and a few wishes to an Outcome, with predictions where the card is known."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace

from ...devices import is_cpu, resolve_devices
from ...errors import RequestError, StrategyError
from ...models.flux.checkpoint import FluxFile, inspect_flux
from ...planner.auto import MeasurementHistory, work_of
from ...planner.cost.communication import Work
from ...planner.cost.machine import model_machine
from ...planner.cost.model import Machine, predict
from ...planner.history.records import candidate_of
from ...planner.machine.fingerprint import cores, cpu_name
from ...planner.machine.probe import read_topology
from ...planner.machine.topology import Topology
from ...planner.ranking import BAND_WITH_ONE_GPU, BAND_WITHOUT
from ...requests import WEIGHT_DTYPES, ModelSpec
from ...strategy import ParallelStrategy
from ...wire.calibration import ALL_TO_ALL, POINT_TO_POINT, Calibration, slowest_rate
from ..doctor.privacy import find_private, scrub
from .candidates import parse_strategies, possible_strategies
from .fitting import split_by_memory
from .outcome import Outcome, Row
from .rounds import Job, random_request, run_rounds

_UNNAMED = ("", "all")


def measure(
    *,
    model: str,
    devices: str,
    width: int,
    height: int,
    batch: int,
    text: int,
    steps: int,
    rounds: int,
    with_cfg: bool,
    strategies: str,
    engine: str,
    weight_dtype: str,
    say: Callable[[str], None],
) -> Outcome:
    """Raises ParallelError for a file, device or strategy that cannot be measured; one that fails is a row."""
    if weight_dtype not in WEIGHT_DTYPES:
        raise RequestError(
            f"weight-dtype {weight_dtype!r} is unknown; choose one of {', '.join(WEIGHT_DTYPES)}."
        )
    names = resolve_devices(devices)
    if is_cpu(names):
        # A device of the CPU is a share of its cores: one rank alone gets no more of them than each of several.
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores() // len(names))))
    file = inspect_flux(model)
    seen = read_topology().visible()
    topology = Topology((), source="none") if is_cpu(names) else _selected(seen, names)
    request = random_request(
        file, width=width, height=height, batch=batch, text=text, steps=steps, with_cfg=with_cfg
    )
    work = work_of(file, request, weight_dtype)
    wanted = _wanted(strategies, work, file, len(names), engine)
    job = Job(
        spec=ModelSpec(model, weight_dtype=weight_dtype),
        file=file,
        request=request,
        engine=engine,
        devices=names,
        rounds=rounds,
        device_bytes=min((d.memory for d in topology.devices), default=0),
    )
    experience = MeasurementHistory(names, seen)
    machine = _machine(topology)
    left_out: dict[ParallelStrategy, str] = {}
    if machine is not None and strategies.strip().lower() in _UNNAMED:  # what a person names is tried
        wanted, left_out = split_by_memory(wanted, work, machine, file.shape)
    rows, together, calibrations = run_rounds(job, wanted, experience, say)
    rows += [Row(strategy, problem=reason) for strategy, reason in left_out.items()]
    alone = next((r.step_s for r in rows if r.strategy.world_size == 1), None)
    if machine is not None:
        rows = [_predicted(row, work, machine, alone) for row in rows]
    private = find_private()
    size = f"{width}x{height}" + (f", batch {batch}" if batch > 1 else "")
    return Outcome(
        rows=tuple(replace(row, problem=scrub(row.problem, private)) for row in rows),
        model=_describe(file, weight_dtype),
        request=f"{size}, {'CFG' if with_cfg else 'no CFG'}, {text} text tokens, {steps} steps a run",
        hardware=_hardware(topology),
        software=experience.fingerprint.software,
        rounds=rounds,
        interleaved=together,
        band=None if machine is None else BAND_WITH_ONE_GPU if alone else BAND_WITHOUT,
        links=tuple(_links(c) for c in calibrations),
    )


def _wanted(text: str, work: Work, file: FluxFile, count: int, engine: str) -> tuple[ParallelStrategy, ...]:
    if text.strip().lower() in _UNNAMED:
        return possible_strategies(work, file.shape, count, engine=engine, fewer=bool(text.strip()))
    wanted = parse_strategies(text)
    for strategy in wanted:
        if strategy.cfg_degree > 1 and work.rows == 1:
            raise StrategyError(f"{strategy.describe()} splits two prompts; add --cfg on, or leave it out.")
        if strategy.data_degree > work.batch:
            raise StrategyError(
                f"{strategy.describe()} splits images; give --batch {strategy.data_degree} or more."
            )
        strategy.check(file.shape, count, engine)
    return wanted


def _selected(seen: Topology, names: tuple[str, ...]) -> Topology:
    known = {f"cuda:{i}": d.uuid for i, d in enumerate(seen.devices)}
    return seen.select([known[name] for name in names if name in known])


def _machine(topology: Topology) -> Machine | None:
    """The devices as the cost model knows them; None for a CPU, or a card without a data sheet."""
    try:
        return model_machine(topology)[0]
    except RequestError:
        return None


def _predicted(row: Row, work: Work, machine: Machine, alone: float | None) -> Row:
    """With the cost model's step time and memory. `alone`: one device's measured step, where it ran."""
    candidate = candidate_of(row.strategy)
    if candidate is None:
        return row
    found = predict(work, candidate, machine, one_gpu_s=alone, with_fixed=False)
    return replace(row, predicted_s=found.step_s, memory_bytes=found.memory_bytes)


def _describe(file: FluxFile, weight_dtype: str) -> str:
    """The model by its sizes: a file's name may be private."""
    d = file.dims
    stored = file.dtype if weight_dtype == "auto" else weight_dtype
    return (
        f"Flux.1 {'dev' if d.guidance else 'schnell'} form, {d.double_blocks}+{d.single_blocks} blocks of width "
        f"{d.hidden}, {stored}, {file.tensor_bytes / 1e9:.3g} GB"
    )


def _hardware(topology: Topology) -> tuple[str, ...]:
    if topology.devices:
        return (topology.describe().rstrip("."), f"{cores()} cores ({cpu_name()})")
    return (
        f"no GPU, gloo on {cores()} cores ({cpu_name()})",
        f"{os.environ['OMP_NUM_THREADS']} thread(s) a rank",
    )


def _links(ranks: tuple[Calibration, ...]) -> str:
    parts = [f"{ranks[0].strategy.describe()} ({ranks[0].backend})"]
    for kind, label in ((ALL_TO_ALL, "all-to-all"), (POINT_TO_POINT, "ring")):
        if (rate := slowest_rate(ranks, kind)) is not None:
            parts.append(f"{label} {rate / 1e9:.3g} GB/s a rank")
    parts.append(f"tiny all-reduce {max(c.collective_s for c in ranks) * 1e6:.0f} us")
    return ", ".join(parts)
