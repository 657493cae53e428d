"""The choice of `auto`: ranks every strategy that this version runs on some devices, by all that is known of them."""

from __future__ import annotations

import time
from dataclasses import replace

from ..devices import is_cpu
from ..errors import RequestError
from ..strategy import ParallelStrategy
from .cost.machine import model_machine
from .cost.model import DEFAULT, Machine, fixed_seconds, measured_constants, predict
from .history.measurement_history import MeasurementHistory
from .history.records import measured, newest_calibration, one_gpu_step
from .job import Job
from .machine.cards import Card, Interconnect
from .ranking import Evidence, Ranking, enumerate_candidates, rank_candidates, rank_predictions
from .rules import StrategySettings


def rank_strategies(settings: StrategySettings, job: Job, history: MeasurementHistory) -> Ranking:
    """The strategies for `job` on the history's devices or the first few of them, the best first.

    None where the rule must decide: an unknown card, or a CPU on which one rank and several have not both been seen at
    this job.
    """
    rank = _rank_on_cpu if is_cpu(history.devices) else _rank_on_gpus
    return rank(settings, job, history, "xfuser" if settings.engine == "xfuser" else "native")


def _rank_on_gpus(settings: StrategySettings, job: Job, history: MeasurementHistory, engine: str) -> Ranking:
    """By measurements and predictions; ranks sit on the devices in the topology's order."""
    try:
        machine, notes = model_machine(history.topology)
    except RequestError as error:
        return Ranking((), notes=(str(error),))
    known, now = history.read(), time.time()
    calibration = newest_calibration(known, history.ids, now)
    fixed_s = fixed_seconds(job, machine.card)
    evidence = Evidence(
        request_s=measured(known, job, history.ids, now, engine=engine, fixed_s=fixed_s),
        one_gpu_s=one_gpu_step(known, job, history.ids, now, engine=engine),
        constants=measured_constants(calibration, machine.link) if calibration else DEFAULT,
        links_measured=bool(calibration),
    )
    candidates = [
        strategy
        for strategy in enumerate_candidates(job, machine.count)
        if not strategy.violations(job.model.shape, machine.count, settings.engine)
    ]
    ranking = rank_candidates(candidates, job, machine, evidence, approximation=settings.approximation)
    return replace(ranking, notes=(*history.topology.notes, *notes))


def _rank_on_cpu(settings: StrategySettings, job: Job, history: MeasurementHistory, engine: str) -> Ranking:
    """A CPU has no data sheet: by what was seen alone, once one rank and several were."""
    known, now = history.read(), time.time()
    # Trials run uncompiled, so where nothing compiled was seen yet they compare.
    for model in dict.fromkeys((job.model, job.model.uncompiled)):
        request_s = measured(known, replace(job, model=model), history.ids, now, engine=engine)
        alone = request_s.get(ParallelStrategy())
        if alone is not None and len(request_s) > 1:
            return _rank_measured(job, request_s, alone, len(history.devices))
    return Ranking(())


def _rank_measured(job: Job, request_s: dict[ParallelStrategy, float], alone: float, count: int) -> Ranking:
    # What predictions need to be asked at all; every candidate is measured, so nothing of it decides.
    rate = job.flop * job.steps / alone / 1e12 / DEFAULT.eager
    card, link = Card("CPU", rate, memory=1e6, bandwidth=1e6), Interconnect("gloo", "host", 10.0)
    machine = Machine(card, link, count, on_cpu=True)
    predictions = [predict(job, strategy, machine, with_fixed=False) for strategy in request_s]
    ranking = rank_predictions(predictions, job, machine, Evidence(request_s))
    ordered = [ranking.best, *sorted(ranking.ranked[1:], key=lambda e: e.seconds)]
    times = ", ".join(f"{e.strategy.describe()} {e.seconds / job.steps:.3g} s" for e in ordered[:4])
    reason = f"{ranking.best.strategy.describe()} on the CPU: measured before, a step takes {times}."
    return replace(ranking, reason=reason)
