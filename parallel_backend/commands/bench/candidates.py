"""The strategies that a benchmark compares: named by a person, or all that a model and the devices allow."""

from __future__ import annotations

import re
from collections.abc import Sequence

from ...devices import is_cpu
from ...errors import StrategyError
from ...layout import crosses_machines
from ...planner.candidates import by_exchange, enumerate_candidates, rule_key
from ...planner.workload.workload import Job
from ...strategy import DEGREES, ParallelStrategy

_DEGREES = {name.removesuffix("_degree"): name for name in DEGREES} | {"groups": "head_groups"}
_ONE = ("one", "1", "single")
_SWITCHES = {"sharded": "shard_weights", "tokens": "sends_tokens"}


def parse_strategies(text: str) -> tuple[ParallelStrategy, ...]:
    """`one,ulysses2,cfg2xring2,ulysses2xsharded,ulysses2xgroups4` as strategies, each once. Raises StrategyError."""
    found = [_parse(part.strip().lower()) for part in text.split(",") if part.strip()]
    if not found:
        raise StrategyError(f"strategies {text!r} names none; write such as one,ulysses2,cfg2xring2.")
    return tuple(dict.fromkeys(found))


def possible_strategies(
    job: Job, devices: Sequence[str], *, engine: str = "auto", fewer: bool = False
) -> tuple[ParallelStrategy, ...]:
    """One device, and all that this version can run on all `devices`, or (`fewer`) on any number of them; of a cluster
    those that keep tokens and layers inside a machine, as `auto` does.

    Exact ones first, in the order of the rule "CFG, then Ulysses, then Ring"; on GPUs Ulysses with other exchanges too.
    """
    count = len(devices)
    candidates = [
        strategy
        for strategy in enumerate_candidates(job, count, sharded=False)
        if (fewer or strategy.world_size in (1, count))
        and not strategy.violations(job.model.shape, count, engine)
        and not crosses_machines(strategy, devices)
    ]
    if not is_cpu(devices):
        candidates += [one for strategy in candidates for one in by_exchange(strategy, job)]
    ordered = sorted(candidates, key=rule_key, reverse=True)
    return tuple(sorted(ordered, key=lambda strategy: (strategy.world_size, not strategy.exact)))


def _parse(part: str) -> ParallelStrategy:
    if part in _ONE:
        return ParallelStrategy()
    degrees: dict[str, int] = {}
    for factor in re.split(r"\s*[x×*]\s*", part):
        if factor in _SWITCHES:
            degrees[_SWITCHES[factor]] = True
            continue
        match = re.fullmatch(r"([a-z]+)[ _=]?(\d{1,2})", factor)
        name = _DEGREES.get(match[1]) if match else None
        if match is None or name is None or name in degrees:
            raise StrategyError(
                f"strategy {part!r} is not understood; write one, or degrees joined by x, each once: "
                f"{', '.join([*(f'{short}N' for short in _DEGREES), *_SWITCHES])}."
            )
        degrees[name] = int(match[2])
    if degrees.get("head_groups", 1) > 1 and degrees.get("ulysses_degree", 1) == 1:
        raise StrategyError(
            f"strategy {part!r}: groups are of the heads that Ulysses exchanges; add ulysses2."
        )
    return ParallelStrategy().replace(**degrees)
