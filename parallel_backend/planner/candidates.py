"""The strategies that a job may run under: lists all valid ones, orders them by the rule, and chooses one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from ..errors import StrategyError
from ..strategy import ParallelStrategy
from .workload.workload import Job

APPROXIMATION = ("never", "if_needed", "allowed")
# A measured strategy must be this many times as fast as the rule's choice to replace it.
MEASURED_GAIN = 1.02
# The share of a step's FLOPs that attention must take before `auto` splits only its queries: two devices then save at
# most a sixth. With less, the gathers and the work that all devices repeat leave no gain.
LEAST_ATTENTION = 1 / 3
HEAD_GROUPS = (2, 4)
Describe = Callable[[ParallelStrategy], str]
SHOWN = 8  # rows of a table that fits under a node


@dataclass(frozen=True)
class Candidate:
    """One strategy for a job. `memory_bytes`: predicted for the fullest device; `step_s`: measured seconds of a step,
    None if unmeasured; `permitted`: False if the settings exclude it, for example because it is approximate."""

    strategy: ParallelStrategy
    memory_bytes: float
    fits: bool = True
    step_s: float | None = None
    permitted: bool = True


@dataclass(frozen=True)
class Ranking:
    """All candidates, the chosen one first; empty if the rule must decide. `reason`: why the chosen one differs from
    the rule's choice, or "".

    Order of the others: those that fit first, then those that are permitted, then by measured time, then by the rule.
    """

    ranked: tuple[Candidate, ...] = ()
    reason: str = ""

    @property
    def best(self) -> Candidate:
        return self.ranked[0]


def enumerate_candidates(job: Job, count: int, *, sharded: bool = True) -> tuple[ParallelStrategy, ...]:
    """Lists every valid strategy on 1 to `count` devices: degrees must suit the model's heads, blocks and rows."""
    found = []
    family, shape = job.model.family, job.model.shape
    for cfg in (1, 2) if job.has_cfg else (1,):
        for data, pipe, ring, ulysses, tensor in _degrees(count // cfg, 5):
            if data > job.batch:
                continue
            if pipe * ring * tensor > 1 and not family.is_transformer:
                continue
            splits = (family.is_transformer or shape.band_rows > 0) and shape.splits_tokens
            splits = splits and shape.takes_ulysses(ulysses) and ulysses <= job.most_bands
            if ring * ulysses > 1 and not splits and not (ring == 1 and queries_pay(job)):
                continue
            slices = shape.splits_layers and shape.splits_layers_unasked
            if tensor > 1 and (not slices or shape.heads % (ulysses * tensor)):
                continue
            if pipe > 1 and not shape.pipelines:
                continue
            if pipe > 1 and (tensor > 1 or pipe > family.block_count or ring * ulysses > job.image_tokens):
                continue
            strategy = ParallelStrategy(data, cfg, pipe, ring, ulysses, tensor)
            found.append(strategy)
            if sharded and strategy.world_size > 1 and tensor == pipe == 1 and family.is_transformer:
                found.append(strategy.replace(shard_weights=True))
    return tuple(found)


def _degrees(count: int, axes: int) -> Iterator[tuple[int, ...]]:
    """Yields the degrees of `axes` axes whose product is at most `count`."""
    if not axes:
        yield ()
        return
    for first in range(1, count + 1):
        for others in _degrees(count // first, axes - 1):
            yield (first, *others)


def by_exchange(strategy: ParallelStrategy, job: Job) -> tuple[ParallelStrategy, ...]:
    """Returns variants of `strategy` that overlap Ulysses's exchanges with attention, with each number of head groups
    worth trying, and one that sends tokens before they are projected."""
    shape, degree = job.model.shape, strategy.ulysses_degree
    if degree == 1 or strategy != strategy.plain_exchange or not shape.splits_tokens or shape.band_rows:
        return ()
    groups = [strategy.replace(head_groups=n) for n in HEAD_GROUPS if shape.heads // degree >= n]
    tokens = [one.replace(sends_tokens=True) for one in groups[:1] if not job.model.compute_options.compiles]
    return (*groups, *(one for one in tokens if not one.violations(shape, one.world_size)))


def queries_pay(job: Job) -> bool:
    """Returns True if attention is so much of the work that splitting only its queries gains."""
    return job.model.shape.splits_queries and job.attention_share >= LEAST_ATTENTION


def rule_key(strategy: ParallelStrategy) -> tuple[int, ...]:
    """Returns the rule's sort key, larger is better: all devices, exact, CFG, unsharded, Ulysses, Ring, then data."""
    return (
        strategy.world_size,
        strategy.exact,
        strategy.cfg_degree,
        not strategy.shard_weights,
        strategy.ulysses_degree,
        strategy.ring_degree,
        strategy.data_degree,
        -strategy.head_groups,
        not strategy.sends_tokens,
    )


def rank_candidates(
    candidates: Iterable[Candidate],
    *,
    approximation: str = "if_needed",
    describe: Describe = ParallelStrategy.describe,
) -> Ranking:
    """Ranks the rule's candidate first, or the fastest measured one; if nothing fits, the smallest.

    `approximation`: when PipeFusion may be chosen: "never", "if_needed" (nothing exact fits), or "allowed" (also if it
    was measured to be faster). Raises StrategyError if no candidate is given or none is permitted.
    """
    entries = list(candidates)
    if not entries:
        raise StrategyError("No candidate strategy was given to choose from.")
    fitting = [e for e in entries if e.fits]
    exact = [e for e in fitting if e.strategy.exact]
    reason = ""
    if exact:
        pool = exact
        if approximation == "allowed":
            pool = exact + [e for e in fitting if not e.strategy.exact and e.step_s is not None]
    elif fitting and approximation != "never":
        pool, reason = fitting, "nothing exact fits in memory, so the approximate PipeFusion is used"
    else:
        allowed = [e for e in entries if e.strategy.exact or approximation != "never"]
        if not allowed:
            raise StrategyError(
                "Only approximate strategies (PipeFusion) are left and approximation is set to never; "
                "set it to if_needed, or add devices or memory."
            )
        pool = [min(allowed, key=lambda e: e.memory_bytes)]
        reason = (
            f"nothing is predicted to fit: the smallest needs {pool[0].memory_bytes / 2**30:.1f} GiB a device; store "
            f"the weights in fp8, or make the image smaller"
        )
    chosen = rule = max(pool, key=lambda e: rule_key(e.strategy))
    if rule.step_s is not None:  # another one can only win if both were measured
        timed = sorted((e for e in pool if e.step_s is not None), key=lambda e: e.step_s or 0.0)
        if rule.step_s > MEASURED_GAIN * (timed[0].step_s or 0.0):
            chosen = timed[0]
        others = [e for e in timed if e is not chosen]
        times = ", ".join(f"{describe(e.strategy)} {e.step_s:.3g} s" for e in (chosen, *others[:3]))
        reason = f"measured before, a step takes {times}"
        if chosen is rule and others:
            reason += ", and the rule (CFG, then Ulysses) stands"
    marked = [replace(e, permitted=any(e is p for p in pool)) for e in entries if e is not chosen]
    rest = sorted(marked, key=lambda e: [-k for k in rule_key(e.strategy)])
    rest.sort(key=lambda e: (not e.fits, not e.permitted, e.step_s is None, e.step_s or 0.0))
    sentence = f"{describe(chosen.strategy)}: {reason}" if reason else ""
    return Ranking((chosen, *rest), sentence)


def table(candidates: Iterable[Candidate], chosen: ParallelStrategy) -> tuple[Candidate, ...]:
    """Returns at most SHOWN rows for display, the chosen strategy first and one device always included."""
    every = list(candidates)
    even = chosen.canonical.replace(device_shares=())  # candidates but one set by hand have equal shares
    chosen_rows = [c for c in every if c.strategy.replace(device_shares=()) == even]
    rest = [c for c in every if c not in chosen_rows]
    shown = (chosen_rows + rest)[:SHOWN]
    alone = [c for c in rest if c.strategy == ParallelStrategy() and c not in shown]
    return tuple(shown[: SHOWN - len(alone)] + alone)
