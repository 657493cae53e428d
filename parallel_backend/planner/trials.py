"""Chooses the strategies that a job tries, the most promising first, by arithmetic and bytes, not predicted times."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from ..devices import is_cpu
from ..errors import RequestError
from ..strategy import ParallelStrategy
from ..trials import BUDGET, MAX_TRIALS, NO_TRIALS, TrialCandidate, TrialPlan, switch_seconds
from .candidates import Candidate, by_exchange, rule_key
from .history import MeasurementHistory
from .step_bounds import bytes_sent, compute_share, fastest_card, lower_bound
from .workload.workload import Job

ONE_DEVICE = ParallelStrategy()
# A strategy that sends more than the first is taken to be this many times as slow: an assumption, to price a trial.
SENDS_MORE = 1.1


def plan_trials(
    rule: ParallelStrategy,
    candidates: Iterable[Candidate],
    job: Job,
    history: MeasurementHistory,
    engine: str,
) -> tuple[ParallelStrategy, TrialPlan]:
    """Returns (the strategy to begin with, the strategies to try next), given the chosen strategy `rule`. Those to try
    are exact, keep each device's weights, run on all of `rule`'s devices or on one, are unmeasured, and fit in memory.
    Variants of `rule`'s exchange are among them. One device is never crowded out by others.

    Strategies that split rows in the same way under different names count as one. The trials may lose a share of this
    job's time and of that of similar jobs since the last one that tried strategies.
    """
    if rule.world_size == 1 or not rule.exact or rule.device_shares or job.step_cache:
        return rule, NO_TRIALS  # steps in which a cache answers say nothing about a strategy
    candidates_by_form: dict[tuple[object, ...], ParallelStrategy] = {}
    entries = list(candidates)
    measured = {candidate.strategy for candidate in entries if candidate.step_s is not None}
    on_cpu = is_cpu(history.devices)  # CPU exchanges cannot overlap with attention: they use the same cores
    exchanged = [
        replace(rule_entry, strategy=strategy, step_s=None)
        for rule_entry in entries
        if rule_entry.strategy == rule and not on_cpu
        for strategy in by_exchange(rule, job)
    ]
    for candidate in (*entries, *exchanged):
        strategy = candidate.strategy
        unseen = strategy not in measured and not history.gave_up(job, strategy, engine)
        is_like_rule = strategy.exact and strategy.weights == rule.weights
        if not (unseen and is_like_rule and candidate.fits and strategy.world_size in (1, rule.world_size)):
            continue
        named = candidates_by_form.setdefault(_form(strategy), strategy)
        candidates_by_form[_form(strategy)] = max(named, strategy, key=rule_key)
    # The arithmetic that a step waits for: that of all ranks if they share the cores of a CPU.
    busy = {
        s: compute_share(job, s) * (s.world_size if on_cpu else 1)
        for s in (rule, *candidates_by_form.values())
    }
    first = rule
    if rule.sequence_degree > 1 and rule not in measured:
        # If it gives no device more to compute, the job begins with a strategy that does not split tokens: whole images
        # on each device if they divide evenly, or one device if ranks share a CPU's cores.
        apart = [s for s in busy if s.sequence_degree == 1 and busy[s] <= busy[rule]]
        first = max(apart, key=rule_key, default=rule)
    candidates_by_form.pop(_form(first), None)
    sent = {s: bytes_sent(job, s) for s in (first, *candidates_by_form.values())}
    prices = {
        s: busy[s] / busy[first] * (SENDS_MORE if sent[s] > sent[first] else 1.0)
        for s in candidates_by_form.values()
    }
    ordered = sorted(prices, key=lambda s: (prices[s], sent[s], [-k for k in rule_key(s)]))
    most = MAX_TRIALS - (ONE_DEVICE in ordered)
    chosen = {*[s for s in ordered if s != ONE_DEVICE][:most], ONE_DEVICE}
    try:
        card = fastest_card(history.topology)
    except RequestError:
        card = None
    switch_s = switch_seconds(on_cpu=on_cpu, compiles=job.model.compute_options.compiles)
    tried = tuple(
        TrialCandidate(
            s,
            prices[s],
            0.0 if card is None else lower_bound(job, s, card),
            # Variants of the exchange use the same communicators, and blocks compiled for the same tokens.
            0.0 if s.plain_exchange == first.plain_exchange else switch_s,
        )
        for s in ordered
        if s in chosen
    )
    budget = BUDGET * job.steps * (1 + history.jobs_before(job, first, engine))
    return first, TrialPlan(tried, budget) if tried else NO_TRIALS


def _form(strategy: ParallelStrategy) -> tuple[object, ...]:
    """Returns a key that is equal for equal computations: data and CFG degrees both split rows."""
    return strategy.row_degree, strategy.replace(data_degree=1, cfg_degree=1)
