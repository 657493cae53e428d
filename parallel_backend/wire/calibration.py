"""Measurements of the links between ranks, as frozen dataclasses that are sent and stored."""

from __future__ import annotations

from dataclasses import dataclass

from ..strategy import ParallelStrategy

# Small: latency dominates. Middle: a layer of one 1024 x 1024 image on eight ranks. Large: bandwidth dominates.
SIZES = (64 * 1024, 4 * 1024**2, 64 * 1024**2)
ALL_TO_ALL, POINT_TO_POINT, PAIR = "all_to_all", "point_to_point", "pair"


@dataclass(frozen=True)
class Transfer:
    """One kind of exchange at one size, as measured by one rank.

    `size`: bytes in a rank's buffer; `sent`: bytes of it that go to other ranks; `seconds`: the median exchange;
    `peer`: the other rank of a PAIR, -1 if all ranks exchange at the same time; `intact`: False if a rank checked the
    received data and it differed from what was sent.
    """

    kind: str
    size: int
    sent: int
    seconds: float
    peer: int = -1
    intact: bool = True

    @property
    def rate(self) -> float:
        """Sent bytes per second."""
        return self.sent / max(self.seconds, 1e-9)


@dataclass(frozen=True)
class RankFacts:
    """Facts that only a rank can find out, because only ranks have a device context.

    `device_uuid`: empty on the CPU; `peers`: per rank, True if this one can read its memory; `all_reduce_error`: the
    largest error of a sum over all ranks with a known result; `kernel`: the attention kernel that half precision would
    use here (options.ATTENTION_KERNELS); `kernel_problem`: why it does not work, or empty.
    """

    device_uuid: str
    peers: tuple[bool, ...]
    all_reduce_error: float
    kernel: str
    kernel_problem: str


@dataclass(frozen=True)
class Calibration:
    """One rank's measurement over the groups of `strategy`.

    `collective_s`: seconds of an all_reduce of one number; `facts`: None unless requested.
    """

    rank: int
    backend: str
    strategy: ParallelStrategy
    transfers: tuple[Transfer, ...]
    collective_s: float
    facts: RankFacts | None = None


def slowest_rate(calibrations: tuple[Calibration, ...], kind: str, size: int = SIZES[-1]) -> float | None:
    """Returns bytes per second of the slowest rank for `kind`, at `size` or the next smaller size measured."""
    found = [t for c in calibrations for t in c.transfers if t.kind == kind and t.size <= size]
    largest = max((t.size for t in found), default=0)
    return min((t.rate for t in found if t.size == largest), default=None)
