"""Which strategies a job tries on its way, the most promising first: arithmetic and bytes, never a predicted time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from ..devices import is_cpu
from ..errors import RequestError
from ..machine.cards import Card, find_card
from ..machine.topology import Topology
from ..strategy import ParallelStrategy
from ..trials import BUDGET, MAX_TRIALS, NO_TRIALS, TrialCandidate, TrialPlan, switch_seconds
from .candidates import Candidate, by_exchange, rule_key
from .history import MeasurementHistory
from .step_bounds import bytes_sent, compute_share, lower_bound
from .workload.workload import Job

ONE_DEVICE = ParallelStrategy()
# What sends more than the first strategy is taken to be so many times as slow. An assumption; it prices a trial only.
SENDS_MORE = 1.1


def plan_trials(
    rule: ParallelStrategy,
    candidates: Iterable[Candidate],
    job: Job,
    history: MeasurementHistory,
    engine: str,
) -> tuple[ParallelStrategy, TrialPlan]:
    """The strategy that a job begins with for which `rule` was chosen, and those to try then: exact, with the same
    weights on each device, on all of `rule`'s devices or on one, not measured yet, and within memory; and `rule`
    with its exchanges otherwise. One device is always among them.

    Neighbours in the rank layout that split rows alike are one strategy under two names; one of them is tried. The
    trials may lose a share of this job, and of like jobs since the last one that tried anything.
    """
    if rule.world_size == 1 or not rule.exact or rule.device_shares or job.step_cache:
        return rule, NO_TRIALS  # a step whose calls a cache answered tells nothing of a strategy
    others: dict[tuple[object, ...], ParallelStrategy] = {}
    entries = list(candidates)
    measured = {candidate.strategy for candidate in entries if candidate.step_s is not None}
    on_cpu = is_cpu(history.devices)  # where exchanges have nothing of their own to run on
    exchanged = [
        replace(own, strategy=strategy, step_s=None)
        for own in entries
        if own.strategy == rule and not on_cpu
        for strategy in by_exchange(rule, job)
    ]
    for candidate in (*entries, *exchanged):
        strategy = candidate.strategy
        unseen = strategy not in measured and not history.gave_up(job, strategy, engine)
        is_like_rule = strategy.exact and strategy.weights == rule.weights
        if not (unseen and is_like_rule and candidate.fits and strategy.world_size in (1, rule.world_size)):
            continue
        named = others.setdefault(_form(strategy), strategy)
        others[_form(strategy)] = max(named, strategy, key=rule_key)
    # Of the arithmetic, what a step waits for: all of it where ranks share the cores of a CPU.
    busy = {s: compute_share(job, s) * (s.world_size if on_cpu else 1) for s in (rule, *others.values())}
    first = rule if rule in measured else _begin_with(rule, busy)
    others.pop(_form(first), None)
    prices = {s: busy[s] / busy[first] * _sending(job, s, first) for s in others.values()}
    ordered = sorted(prices, key=lambda s: (prices[s], bytes_sent(job, s), [-k for k in rule_key(s)]))
    most = MAX_TRIALS - (ONE_DEVICE in ordered)
    chosen = {*[s for s in ordered if s != ONE_DEVICE][:most], ONE_DEVICE}
    card = _fastest_card(history.topology)
    switch_s = switch_seconds(on_cpu=on_cpu, compiles=job.model.compute_options.compiles)
    tried = tuple(
        TrialCandidate(
            s,
            prices[s],
            0.0 if card is None else lower_bound(job, s, card),
            # Other exchanges meet over the same communicators, in blocks compiled for the same tokens.
            0.0 if s.plain_exchange == first.plain_exchange else switch_s,
        )
        for s in ordered
        if s in chosen
    )
    budget = BUDGET * job.steps * (1 + history.jobs_before(job, first, engine))
    return first, TrialPlan(tried, budget) if tried else NO_TRIALS


def _begin_with(rule: ParallelStrategy, busy: Mapping[ParallelStrategy, float]) -> ParallelStrategy:
    """Where `rule` splits tokens, one that splits none if no device computes more then: whole images on each device
    where they come out even, and one device where ranks share the cores of a CPU."""
    apart = [s for s in busy if s.sequence_degree == 1 and busy[s] <= busy[rule]]
    return max(apart, key=rule_key, default=rule) if rule.sequence_degree > 1 else rule


def _form(strategy: ParallelStrategy) -> tuple[object, ...]:
    """Images and prompts are rows alike, so strategies that differ only in what they call them compute the same."""
    return strategy.row_degree, strategy.replace(data_degree=1, cfg_degree=1)


def _sending(job: Job, strategy: ParallelStrategy, first: ParallelStrategy) -> float:
    return SENDS_MORE if bytes_sent(job, strategy) > bytes_sent(job, first) else 1.0


def _fastest_card(topology: Topology) -> Card | None:
    """Of the devices, for bounds that hold on each; None for a CPU, or where one has no data sheet."""
    try:
        cards = [find_card(device.name.split(" MIG ")[0]) for device in topology.devices]
    except RequestError:
        return None
    return max(cards, key=lambda card: card.tflops, default=None)
