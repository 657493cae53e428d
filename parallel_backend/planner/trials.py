"""Which strategies a job tries on its way, the most promising first: arithmetic and bytes, never a predicted time."""

from __future__ import annotations

from collections.abc import Iterable

from ..devices import is_cpu
from ..errors import RequestError
from ..machine.cards import Card, find_card
from ..machine.topology import Topology
from ..strategy import ParallelStrategy
from ..trials import BUDGET, MOST_OTHERS, NO_TRIALS, TrialCandidate, TrialPlan, switch_seconds
from .candidates import Candidate, rule_key
from .history.measurement_history import MeasurementHistory
from .job import Job
from .sheet import bytes_sent, compute_share, lower_bound

ONE_DEVICE = ParallelStrategy()
# What sends more than the first strategy is taken to be so many times as slow. An assumption; it prices a trial only.
SENDS_MORE = 1.1


def plan_trials(
    first: ParallelStrategy,
    candidates: Iterable[Candidate],
    job: Job,
    history: MeasurementHistory,
    engine: str,
) -> TrialPlan:
    """Strategies to try in a job that begins under `first`: exact, with the same weights on each device, on all of
    `first`'s devices or on one, not measured yet, and within memory. One device is always among them.

    Neighbours in the rank layout that split rows alike are one strategy under two names; one of them is tried. The
    trials may lose a share of this job, and of like jobs since the last one that tried anything.
    """
    if first.world_size == 1 or not first.exact or first.device_shares or job.step_cache:
        return NO_TRIALS  # a step whose calls a cache answered tells nothing of a strategy
    others: dict[tuple[object, ...], ParallelStrategy] = {}
    for candidate in candidates:
        strategy = candidate.strategy
        is_new = candidate.step_s is None and not history.gave_up(job, strategy, engine)
        alike = strategy.exact and strategy.weights == first.weights
        if not (is_new and alike and candidate.fits and strategy.world_size in (1, first.world_size)):
            continue
        named = others.setdefault(_form(strategy), strategy)
        others[_form(strategy)] = max(named, strategy, key=rule_key)
    others.pop(_form(first), None)
    on_cpu = is_cpu(history.devices)
    prices = {s: _price(job, s, first, on_cpu=on_cpu) for s in others.values()}
    ordered = sorted(prices, key=lambda s: (prices[s], bytes_sent(job, s), [-k for k in rule_key(s)]))
    most = MOST_OTHERS - (ONE_DEVICE in ordered)
    chosen = {*[s for s in ordered if s != ONE_DEVICE][:most], ONE_DEVICE}
    card = _fastest_card(history.topology)
    switch_s = switch_seconds(on_cpu=on_cpu, compiles=job.model.compute_options.compiles)
    tried = tuple(
        TrialCandidate(s, prices[s], 0.0 if card is None else lower_bound(job, s, card), switch_s)
        for s in ordered
        if s in chosen
    )
    budget = BUDGET * job.steps * (1 + history.jobs_before(job, first, engine))
    return TrialPlan(tried, budget) if tried else NO_TRIALS


def _form(strategy: ParallelStrategy) -> tuple[object, ...]:
    """Images and prompts are rows alike, so strategies that differ only in what they call them compute the same."""
    return strategy.row_degree, strategy.replace(data_degree=1, cfg_degree=1)


def _price(job: Job, strategy: ParallelStrategy, first: ParallelStrategy, *, on_cpu: bool) -> float:
    """TrialCandidate.slower. Ranks on a CPU share its cores, so there it is all the arithmetic that counts."""
    busy, busy_first = (compute_share(job, s) * (s.world_size if on_cpu else 1) for s in (strategy, first))
    sends_more = bytes_sent(job, strategy) > bytes_sent(job, first)
    return busy / busy_first * (SENDS_MORE if sends_more else 1.0)


def _fastest_card(topology: Topology) -> Card | None:
    """Of the devices, for bounds that hold on each; None for a CPU, or where one has no data sheet."""
    try:
        cards = [find_card(device.name.split(" MIG ")[0]) for device in topology.devices]
    except RequestError:
        return None
    return max(cards, key=lambda card: card.tflops, default=None)
