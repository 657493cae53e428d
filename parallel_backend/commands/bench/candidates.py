"""The strategies that a benchmark compares: those that the user names, or all that model, devices and memory allow."""

from __future__ import annotations

import re
from collections.abc import Sequence

from ...devices import is_cpu, machine_of
from ...errors import StrategyError
from ...layout import crosses_machines
from ...planner.candidates import by_exchange, enumerate_candidates, rule_key
from ...planner.plan import USABLE_MEMORY
from ...planner.workload.fit import Capacity, MemoryCheck, fits
from ...planner.workload.workload import Job
from ...strategy import DEGREES, ParallelStrategy

_DEGREES = {name.removesuffix("_degree"): name for name in DEGREES} | {"groups": "head_groups"}
_ONE = ("one", "1", "single")
_SWITCHES = {"sharded": "shard_weights", "tokens": "sends_tokens"}
Layout = tuple[int, ParallelStrategy]


def parse_strategies(text: str) -> tuple[ParallelStrategy, ...]:
    """Reads distinct strategies from text such as `one,ulysses2,cfg2xring2,ulysses2xsharded,ulysses2xgroups4`.
    Raises StrategyError if a part is not understood or nothing is named."""
    found = [_parse(part.strip().lower()) for part in text.split(",") if part.strip()]
    if not found:
        raise StrategyError(f"strategies {text!r} names none; write such as one,ulysses2,cfg2xring2.")
    return tuple(dict.fromkeys(found))


def possible_strategies(
    job: Job, devices: Sequence[str], *, engine: str = "auto", fewer: bool = False
) -> tuple[ParallelStrategy, ...]:
    """Returns one device and every strategy that can run on all `devices`, or with `fewer` on any number of them.

    On a cluster, tokens and layers are only split inside a machine, as in mode auto. On GPUs, Ulysses also comes with
    its other exchanges. Sorted by number of devices, then exact before approximate, then CFG, Ulysses, Ring.
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


def split_by_memory(
    strategies: Sequence[ParallelStrategy],
    job: Job,
    devices: tuple[str, ...],
    capacity: Capacity | None = None,
) -> tuple[list[ParallelStrategy], dict[ParallelStrategy, str]]:
    """Returns (the strategies to run, the reason for each one left out). One that does not fit is replaced by the same
    strategy with sharded weights if that fits. `capacity`: of `devices`, read now if None."""
    run: list[ParallelStrategy] = []
    left_out: dict[ParallelStrategy, str] = {}
    for strategy in strategies:
        check = MemoryCheck.on(job, strategy, devices)
        if fits(check, capacity):
            run.append(strategy)
            continue
        needed = check.fullest.private_bytes
        left_out[strategy] = f"predicted not to fit: {needed / 1e9:.1f} GB on the fullest device"
        sharded = strategy.replace(shard_weights=True)
        if (
            strategy.world_size > 1
            and not sharded.violations(job.model.shape, len(devices))
            and fits(MemoryCheck(job, sharded, check.devices), capacity)
        ):
            run.append(sharded)
    return list(dict.fromkeys(run)), left_out


def layout_of(strategy: ParallelStrategy) -> Layout:
    """Returns a key: strategies with the same one can share a group of ranks without loading the model again."""
    return strategy.world_size, strategy.weights


def fit_side_by_side(
    strategies: Sequence[ParallelStrategy],
    job: Job,
    devices: tuple[str, ...],
    capacity: Capacity | None = None,
) -> bool:
    """Returns True if one group of ranks per layout of the weights can stay warm at the same time. The first device has
    a rank of each. A machine of a cluster serves only one group. `capacity`: of `devices`, read now if None."""
    if machine_of(devices[0]):
        return len(set(map(layout_of, strategies))) == 1
    on_cpu, needed = is_cpu(devices), dict[Layout, int]()
    for strategy in strategies:
        check = MemoryCheck.on(job, strategy, devices)
        size = sum(m.private_bytes for m in check.memories) if on_cpu else check.fullest.private_bytes
        needed[layout_of(strategy)] = max(size, needed.get(layout_of(strategy), 0))
    capacity = capacity or Capacity.of(devices)
    used = capacity.used_elsewhere or (0,) * len(capacity.sizes)
    free = [USABLE_MEMORY * size - held for size, held in zip(capacity.sizes, used, strict=True) if size]
    return sum(needed.values()) <= min(free, default=float("inf"))
