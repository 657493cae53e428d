"""Findings about the links as the ranks measured them: self-test, peer access, bandwidth, latency, intact data."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ...errors import DeviceError
from ...machine.topology import Topology
from ...planner.step_bounds import ulysses_bytes
from ...wire.calibration import (
    ALL_TO_ALL,
    PAIR,
    POINT_TO_POINT,
    SIZES,
    Calibration,
    RankFacts,
    slowest_rate,
)
from ...wire.checks.findings import Finding

# Share of a pair's nominal rate below which it is reported as slow. Copies through host memory still reach 0.4.
SLOW_SHARE = 0.25
# Seconds of a one-number all-reduce. NCCL takes 15 to 50 us within a box; a Flux step makes about 200 collectives.
SLOW_COLLECTIVE = {"nccl": 200e-6, "gloo": 2e-3}
# (name, description, tokens, published model (name, blocks, width)) of a picture with one prompt, at 16 pixels a token.
# Image: 4,096 image tokens and 512 of text. Video: 81 frames are 21 latent frames of 30 x 52 tokens each.
_PICTURES = (
    ("worth an image", "a 1024 × 1024 image of {model}", 4096 + 512, ("Flux.1", 57, 3072)),
    ("worth a video", "5 seconds of 832 × 480 of {model}", 21 * 30 * 52, ("Wan 2.1 14B", 40, 5120)),
)
_BYTES = 2  # per number, in bfloat16
_GOOD = 0.85  # parallel efficiency that counts as good: speed-up divided by the number of devices
_CORRUPT = (
    "set NCCL_P2P_DISABLE=1, which avoids the direct path; then switch off the IOMMU or ACS in the BIOS, or update "
    "it"
)


def of_ranks(topology: Topology, ranks: Sequence[Calibration]) -> Topology | None:
    """Returns the devices in rank order, by the UUIDs that the ranks reported; None if one of them is unknown."""
    try:
        return topology.select([_facts(c).device_uuid for c in ranks])
    except DeviceError:
        return None


def check_links(
    ranks: Sequence[Calibration],
    topology: Topology | None,
    *,
    across: bool = False,
    models: Sequence[tuple[int, int]] = (),
) -> Iterator[Finding]:
    """Yields the findings from a thorough calibration of at least two ranks.

    `topology`: their devices in rank order, None if unknown; `across`: True for a cluster, where device numbers mean
    nothing on other machines; `models`: (blocks, width) of the user's models, empty for published ones."""
    yield _all_reduce(ranks)
    yield _intact(ranks)
    if not across and (topology is not None or any(_facts(c).device_uuid for c in ranks)):
        yield _peer_access(ranks, topology)
    yield _matrix(ranks, topology)
    yield _all_at_once(ranks)
    yield _latency(ranks, across)
    if across:
        return
    user_models = [
        (f"your model of {blocks} blocks of width {width}", blocks, width) for blocks, width in models
    ]
    for name, words, tokens, published in _PICTURES:
        for model, blocks, width in user_models or [published]:
            yield _worth(ranks, name, words.format(model=model), tokens, blocks, width)


def _all_reduce(ranks: Sequence[Calibration]) -> Finding:
    worst = max(ranks, key=lambda c: _facts(c).all_reduce_error)
    error = _facts(worst).all_reduce_error
    backend = worst.backend.upper() if worst.backend == "nccl" else worst.backend
    if error:
        return Finding(
            "all-reduce",
            "broken",
            f"{backend} over {len(ranks)} processes gives a wrong sum (process {worst.rank} is off by "
            f"{error:g}): pictures would be wrong",
            _CORRUPT,
        )
    return Finding("all-reduce", "ok", f"{backend} over {len(ranks)} processes gives the right sum")


def _intact(ranks: Sequence[Calibration]) -> Finding:
    broken = [(c.rank, t) for c in ranks for t in c.transfers if not t.intact]
    if broken:
        rank, transfer = broken[0]
        where = (
            f"between processes {transfer.peer} and {rank}" if transfer.peer >= 0 else f"at process {rank}"
        )
        return Finding(
            "data",
            "broken",
            f"what arrives is not what was sent ({transfer.kind.replace('_', '-')} of {_size(transfer.size)} {where}, "
            f"{len(broken)} such): pictures would be wrong",
            _CORRUPT,
        )
    return Finding("data", "ok", "arrives as it was sent, in every exchange that was tried")


def _peer_access(ranks: Sequence[Calibration], topology: Topology | None) -> Finding:
    missing = [
        (c.rank, other)
        for c in ranks
        for other, can in enumerate(_facts(c).peers)
        if not can and c.rank < other
    ]
    total = len(ranks) * (len(ranks) - 1) // 2
    promised = 0
    if topology is not None:
        ids = [d.uuid for d in topology.devices]
        promised = sum(topology.pair(ids[a], ids[b]).peer is True for a, b in missing)
    if not missing:
        return Finding("peer access", "ok", f"all {total} pairs")
    finding = f"{len(missing)} of {total} pairs of GPUs have none, so data is copied through host memory"
    if promised:
        finding += f"; NVML promises it for {promised} of them, and CUDA does not give it"
        remedy = "switch off the IOMMU and ACS in the BIOS; a virtual machine needs both GPUs passed through"
    else:
        remedy = (
            "GeForce cards have none since the 40 series: prefer CFG parallelism, larger images, or one GPU"
        )
    return Finding("peer access", "slow", finding, remedy)


def _matrix(ranks: Sequence[Calibration], topology: Topology | None) -> Finding:
    """Reports one-way GB/s of each pair while the others are idle, at the largest size that was measured."""
    rates: dict[tuple[int, int], float] = {}
    size = 0
    for c in ranks:
        for t in sorted((t for t in c.transfers if t.kind == PAIR), key=lambda t: t.size):
            rates[c.rank, t.peer], size = t.rate / 1e9, t.size
    if not rates:
        return Finding("bandwidth", "skipped", "no time was left to measure the pairs", "run it again")
    details = _table(rates, len(ranks), "GPU" if topology else "process")
    slow = []
    if topology is not None:
        ids = [d.uuid for d in topology.devices]
        slow = [
            f"{a}–{b}"
            for (a, b), rate in rates.items()
            if a < b and rate < SLOW_SHARE * topology.pair(ids[a], ids[b]).rate
        ]
    finding = f"each pair alone, {_size(size)}, GB/s one way: {min(rates.values()):.2f} to {max(rates.values()):.2f}"
    if slow:
        return Finding(
            "bandwidth",
            "slow",
            f"{finding}; less than {SLOW_SHARE:.0%} of nominal: {', '.join(slow)}",
            "look whether the slot runs at its full width (nvidia-smi -q -d PCIE under load), and whether another "
            "program uses these GPUs",
            details,
        )
    return Finding("bandwidth", "ok", finding, details=details)


def _all_at_once(ranks: Sequence[Calibration]) -> Finding:
    """Reports the rate of the slowest rank while all ranks send at once, as in sequence parallelism."""
    parts = []
    for kind, label in ((ALL_TO_ALL, "all-to-all"), (POINT_TO_POINT, "ring")):
        rates = [slowest_rate(tuple(ranks), kind, size) for size in SIZES]
        if rates[0] is not None:
            parts.append(f"{label} {' / '.join(f'{r / 1e9:.2f}' for r in rates if r is not None)}")
    if not parts:
        return Finding("all at once", "skipped", "no time was left to measure it", "run it again")
    sizes = " / ".join(_size(size) for size in SIZES)
    return Finding("all at once", "ok", f"GB/s that the slowest process sends at {sizes}: {'; '.join(parts)}")


def _latency(ranks: Sequence[Calibration], across: bool) -> Finding:
    slowest = max(ranks, key=lambda c: c.collective_s)
    finding = f"an all-reduce of one number takes {slowest.collective_s * 1e6:.0f} us"
    if slowest.collective_s > SLOW_COLLECTIVE.get(slowest.backend, 1.0):
        return Finding(
            "latency",
            "slow",
            f"{finding}, and a step makes hundreds of them",
            "keep tokens and layers inside a machine, as mode auto does: CFG, batches and PipeFusion wait rarely"
            if across
            else "look whether the CPU is busy with something else, or give the processes more cores",
        )
    return Finding("latency", "ok", finding)


def _worth(
    ranks: Sequence[Calibration], name: str, words: str, tokens: int, blocks: int, width: int
) -> Finding:
    """Reports how long a step on one device must take for all devices to be faster, from the bytes that Ulysses
    exchanges and the measured rates. It does not predict the time of a step itself."""
    count, rate = len(ranks), slowest_rate(tuple(ranks), ALL_TO_ALL)
    if rate is None:
        return Finding(name, "skipped", "no time was left to measure it", "run it again")
    sent = ulysses_bytes(tokens, count) * width * blocks * _BYTES
    exchange_s = sent / rate + 2 * blocks * max(c.collective_s for c in ranks)
    # A step of t seconds on one device takes t / n + exchange on n. It is s times as fast where that equals t / s.
    even_s, good_s = (exchange_s / (1 / s - 1 / count) for s in (1, _GOOD * count))
    return Finding(
        name,
        "ok",
        f"{words}: a step spends {_time(exchange_s)} s on exchanges of {count} devices, so they are faster where a "
        f"step takes more than {_time(even_s)} s on one, and {_GOOD * count:.1f} times as fast from {_time(good_s)} s "
        f"on",
    )


def _time(seconds: float) -> str:
    return f"{seconds:.0f}" if seconds >= 10 else f"{seconds:.2g}"


def _facts(rank: Calibration) -> RankFacts:
    assert rank.facts is not None, "only a thorough calibration has them"
    return rank.facts


def _table(rates: dict[tuple[int, int], float], count: int, what: str) -> tuple[str, ...]:
    wide = len(f"{what} {count}") + 2
    rows = ["".join([" " * wide, *(f"{f'{what} {i}':>{wide}s}" for i in range(count))])]
    for a in range(count):
        cells = ["·" if a == b else f"{rates[a, b]:.2f}" if (a, b) in rates else "?" for b in range(count)]
        rows.append("".join([f"{f'{what} {a}':{wide}s}", *(f"{cell:>{wide}s}" for cell in cells)]))
    return tuple(rows)


def _size(size: int) -> str:
    return f"{size >> 20} MiB" if size >= 1 << 20 else f"{size >> 10} KiB"
