"""Measurements of the links between ranks, as frozen facts that travel and are kept on disk."""

from __future__ import annotations

from dataclasses import dataclass

from ..strategy import ParallelStrategy

# Small: latency decides. Middle: a layer of one 1024 x 1024 image on eight ranks. Large: bandwidth decides.
SIZES = (64 * 1024, 4 * 1024**2, 64 * 1024**2)
ALL_TO_ALL, POINT_TO_POINT, PAIR = "all_to_all", "point_to_point", "pair"


@dataclass(frozen=True)
class Transfer:
    """One kind of exchange at one size, as one rank saw it.

    `size`: bytes that a rank hands over; `sent`: those of them that leave it for other ranks; `seconds`: the median
    exchange; `peer`: the other rank of a PAIR, -1 where all ranks exchange at once; `intact`: False when a rank looked
    at what arrived and it was not what was sent.
    """

    kind: str
    size: int
    sent: int
    seconds: float
    peer: int = -1
    intact: bool = True

    @property
    def rate(self) -> float:
        """Bytes per second that left the rank."""
        return self.sent / max(self.seconds, 1e-9)


@dataclass(frozen=True)
class RankFacts:
    """Facts that only a rank can find out, since it alone has a device context.

    `device_uuid`: empty on the CPU; `peers`: per rank, whether this one can read its memory; `all_reduce_error`: the
    largest deviation of a sum over all ranks whose result is known; `kernel`: the attention kernel that half precision
    would use here (options.ATTENTION_KERNELS); `kernel_problem`: why it does not work, or empty.
    """

    device_uuid: str
    peers: tuple[bool, ...]
    all_reduce_error: float
    kernel: str
    kernel_problem: str


@dataclass(frozen=True)
class Calibration:
    """One rank's measurement over the groups of `strategy`.

    `collective_s`: seconds of an all_reduce of one number; `seconds`: all of the calibration; `facts`: only where they
    were asked for.
    """

    rank: int
    backend: str
    strategy: ParallelStrategy
    transfers: tuple[Transfer, ...]
    collective_s: float
    seconds: float
    facts: RankFacts | None = None


def slowest_rate(calibrations: tuple[Calibration, ...], kind: str, size: int = SIZES[-1]) -> float | None:
    """Bytes per second of the slowest rank in exchanges of `kind`, at `size` or the largest size below it measured."""
    found = [t for c in calibrations for t in c.transfers if t.kind == kind and t.size <= size]
    largest = max((t.size for t in found), default=0)
    return min((t.rate for t in found if t.size == largest), default=None)
