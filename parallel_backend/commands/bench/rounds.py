"""Runs the strategies in turns on warm ranks, returns the time of every warm step and records it for later choices."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace

import torch

from ...errors import ParallelError
from ...planner.history import MeasurementHistory
from ...planner.workload.workload import Job
from ...requests import Conditioning, InputShapes, ModelSpec, Placement, RunInfo, SampleRequest
from ...sidecar.sidecar import Sidecar
from ...strategy import ParallelStrategy
from ...wire.calibration import Calibration
from ..doctor.parity import largest_difference
from .fitting import Layout, fit_side_by_side, layout_of
from .outcome import StrategyRow

CFG = 4.0  # with any scale other than 1 the negative prompt is evaluated
_GUIDANCE = 3.5


def random_request(
    inputs: InputShapes, *, width: int, height: int, batch: int, text: int, steps: int, with_cfg: bool
) -> SampleRequest:
    """Returns a text-to-image request with random inputs: time does not depend on the picture. Sizes in pixels."""
    generator = torch.Generator().manual_seed(0)

    def prompt() -> Conditioning:
        return Conditioning(
            context=torch.randn(1, text, inputs.context, generator=generator),
            pooled=torch.randn(1, inputs.pooled, generator=generator),
            guidance=torch.tensor([_GUIDANCE]),  # ignored by models without a guidance embedding
        )

    noise = torch.randn(batch, inputs.channels_out, -(-height // 8), -(-width // 8), generator=generator)
    return SampleRequest(
        noise=noise,
        sigmas=torch.linspace(1, 0, steps + 1),
        positive=prompt(),
        negative=prompt() if with_cfg else None,
        cfg=CFG if with_cfg else 1.0,
    )


def run_rounds(
    strategies: Sequence[ParallelStrategy],
    spec: ModelSpec,
    request: SampleRequest,
    job: Job,
    history: MeasurementHistory,
    *,
    devices: tuple[str, ...],
    engine: str,
    rounds: int,
    say: Callable[[str], None],
) -> tuple[list[StrategyRow], bool, list[tuple[Calibration, ...]]]:
    """Returns (a row per strategy, True if all took turns, the calibration of each strategy on several devices).
    A strategy that fails gets a row with the problem and does not stop the others. `job`: of `request`; `rounds`: runs
    that count, after one warm-up run."""
    side_by_side = fit_side_by_side(strategies, job, devices)
    rows = {s: StrategyRow(s) for s in strategies}
    calibrations: list[tuple[Calibration, ...]] = []
    reference: torch.Tensor | None = None
    for block in _blocks(strategies, side_by_side):
        with ExitStack() as stack:
            groups: dict[Layout, Sidecar] = {}
            for s in block:
                if layout_of(s) not in groups:
                    groups[layout_of(s)] = Sidecar(devices[: s.world_size])
                    stack.callback(groups[layout_of(s)].stop)
            for turn in range(rounds + 1):
                for s in block:
                    if rows[s].problem:
                        continue
                    sidecar, placement = groups[layout_of(s)], Placement(s, engine)
                    say(f"{f'round {turn} of {rounds}' if turn else 'warming up'}: {s.describe()}")
                    try:
                        result = sidecar.sample(spec, request, placement)
                        if turn == 0 and s.world_size > 1:
                            calibrations.append(sidecar.calibrate(placement))
                    except ParallelError as error:
                        lines = str(error).strip().splitlines() or [type(error).__name__]
                        rows[s] = replace(rows[s], problem=lines[0].strip())
                        continue
                    if turn == 0:
                        reference = result.latent if reference is None else reference
                        rows[s] = replace(rows[s], difference=largest_difference(result.latent, reference))
                    else:
                        rows[s] = _with_run(rows[s], result.info)
                        history.record(job, result.info)
    return [rows[s] for s in strategies], side_by_side, calibrations


def _blocks(strategies: Sequence[ParallelStrategy], side_by_side: bool) -> Iterator[list[ParallelStrategy]]:
    """Yields lists of strategies that take turns: all of them, or those with one group and layout of the weights."""
    if side_by_side:
        yield list(strategies)
        return
    for layout in dict.fromkeys(map(layout_of, strategies)):
        yield [s for s in strategies if layout_of(s) == layout]


def _with_run(row: StrategyRow, info: RunInfo) -> StrategyRow:
    """Adds the steps of a run. The first one also waits for earlier work, so it only counts if it is the only one."""
    warm = info.step_seconds[1:] or info.step_seconds
    return replace(
        row,
        engine=info.engine,
        step_seconds=(*row.step_seconds, *warm),
        sent_bytes=sum(info.bytes_sent) / max(1, len(info.step_seconds)),
    )
