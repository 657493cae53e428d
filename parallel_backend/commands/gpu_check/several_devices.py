"""Checks of two or more devices: their links, every strategy against one device, PipeFusion, and memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ...devices import is_cpu
from ...machine.probe import read_visible
from ...strategy import ParallelStrategy
from ...wire.checks.findings import Finding
from ..doctor.links import check_links, of_ranks
from ..doctor.parity import Parity, check_parity, largest_difference
from ..doctor.rank_probe import probe_links
from .ranks import Examine, Ranks, dtype_of, gigabytes, steps_in_words

# One strategy per way to split. "sharded 2" shards the weights and the tokens over two ranks.
SPLITS = {
    "Ulysses 2": ParallelStrategy(ulysses_degree=2),
    "Ulysses 2, 4 groups": ParallelStrategy(ulysses_degree=2, head_groups=4),
    "Ulysses 2, tokens sent": ParallelStrategy(ulysses_degree=2, head_groups=2, sends_tokens=True),
    "Ring 2": ParallelStrategy(ring_degree=2),
    "CFG 2": ParallelStrategy(cfg_degree=2),
    "sharded 2": ParallelStrategy(ulysses_degree=2, shard_weights=True),
    "tensor 2": ParallelStrategy(tensor_degree=2),
}
_PIPE = ParallelStrategy(pipefusion_degree=2)
_PIPE_LIMIT = 60.0  # s for a job
# (warm-up steps, patches): each combination gives another order of messages between two stages.
PIPES = ((1, 2), (1, 6), (0, 2), (0, 6))
# Growth from one round over all strategies to the next that is not a leak but fragmentation of the allocator.
_GROWTH_SHARE, _GROWTH_BYTES = 1.05, 64e6


def check_all_links(ranks: Ranks) -> Iterator[Finding]:
    """Checks the links of all devices: peer access, intact data and rates."""
    calibrations = probe_links(ranks.group(len(ranks.subject.devices)))
    topology = None if is_cpu(ranks.subject.devices) else of_ranks(read_visible(), calibrations)
    return check_links(calibrations, topology)


def check_strategies(ranks: Ranks) -> Iterator[Finding]:
    """Compares each way to split with one device, at both sizes; for the demo model on GPUs also in float32."""
    both = not is_cpu(ranks.subject.devices) and ranks.subject.is_demo
    dtypes = ("auto", "float32") if both else ("auto",)
    sizes = (ranks.square, ranks.subject.odd_pixels)
    for dtype in dtypes:
        for size in sizes:
            ranks.expected(size, dtype)  # one device's results first: its ranks may have to end later
    runs: dict[tuple[int, int], list[Parity]] = {size: [] for size in sizes}
    times = []
    for name, strategy in SPLITS.items():
        for dtype in dtypes:
            for size in sizes:
                result, expected = ranks.sample(strategy, size=size, dtype=dtype), ranks.expected(size, dtype)
                computed = dtype_of(expected)
                runs[size].append(Parity(computed, name, largest_difference(result.latent, expected.latent)))
                if size == ranks.square:
                    times.append(f"{name}, {computed}: {steps_in_words(result)}")
    for (height, width), same in runs.items():
        for finding in check_parity(same):
            yield replace(finding, name=f"same latent at {width} × {height}")
    yield Finding("steps", "ok", "of the runs above, the first one of a job warms up", details=tuple(times))


def pipefusion(warmup: int, patches: int) -> Examine:
    """Returns a check that runs PipeFusion on two ranks; a job that exceeds its time limit is ended and reported."""
    strategy = _PIPE.replace(warmup_steps=warmup, num_pipeline_patch=patches)

    def check(ranks: Ranks) -> Iterator[Finding]:
        ranks.group(2).load(ranks.spec, strategy)
        result = ranks.sample(strategy, limit_s=_PIPE_LIMIT)
        name, steps = f"warm-up {warmup}, {patches} patches", steps_in_words(result)
        if result.latent.isfinite().all():
            yield Finding(name, "ok", f"{steps}, approximate by design; the latent is finite")
        else:
            remedy = "use more warm-up steps or another strategy, and report it with this text"
            yield Finding(name, "broken", f"{steps}: the latent is not finite", remedy)

    return check


def check_one_process(ranks: Ranks) -> Iterator[Finding]:
    """Runs every strategy twice on the same ranks: they keep communicators and buffers, which must not grow."""
    strategies = {**SPLITS, "PipeFusion 2": _PIPE}
    rounds: list[dict[str, int]] = []
    for _ in range(2):
        held = {}
        for name, strategy in strategies.items():
            ranks.sample(strategy)
            held[name] = max(rank.weight_bytes + rank.working_bytes for rank in ranks.memory(2))
        rounds.append(held)
    yield judge_growth(*rounds)


def judge_growth(first: dict[str, int], second: dict[str, int]) -> Finding:
    """Returns the verdict on bytes of the fuller rank after each strategy, in the first and in the second round."""
    table = tuple(f"{name:<20s}{gigabytes(first[name]):>10s}{gigabytes(second[name]):>10s}" for name in first)
    grown = [n for n in first if second[n] > _GROWTH_SHARE * first[n] + _GROWTH_BYTES]
    if not grown:
        return Finding(
            "memory after each", "ok", "the second round takes no more than the first", details=table
        )
    remedy = "report it with this table; stop the processes in the status panel when memory is short"
    return Finding("memory after each", "slow", f"grows with {', '.join(grown)}", remedy, table)
