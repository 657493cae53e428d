"""Measures the links between the ranks on the process groups that a strategy uses, within a budget of seconds.

On GPUs, each group takes memory permanently and some seconds at its first use. So only groups that the strategy uses
anyway are measured, except for all pairs in a thorough calibration. The clock starts when the groups are connected.

Every rank makes the same number of exchanges. Rank 0 decides by its clock, and a rank without memory for the buffers
can veto; one all_reduce of the control group carries both.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from itertools import combinations, product
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor

from ...engine.comm.groups import Axis, Layout, World
from ...errors import StrategyError
from ...wire.calibration import ALL_TO_ALL, PAIR, POINT_TO_POINT, SIZES, Calibration, RankFacts, Transfer
from ...wire.protocol import Calibrate
from ..outcome.errors import is_out_of_memory

BATCHES = 3  # the median batch is reported
MOST_REPETITIONS = 20  # per batch; the time of a tiny exchange is steady after that many
_SHARE = 0.1  # of the budget, for one kind of exchange at one size
_ANY = 1 << 20  # the value of a rank that leaves the decision to rank 0
_BLOCK = 4096  # bytes after which the test pattern repeats
_SUM_ELEMENTS = 256 * 1024
_REFUSED = 1e30  # replaces a difference that is not a finite number

Transmit = Callable[[], Tensor | None]  # makes one exchange, returns what arrived
Prepared = tuple[Transmit, Callable[[], Tensor], int]  # exchange, expected result, bytes sent


def calibrate(world: World, layout: Layout, message: Calibrate) -> Calibration:
    """Measures the groups of `layout`. Collective: all ranks call it with the same strategy. Raises StrategyError."""
    if layout.strategy.world_size < world.world_size:
        raise StrategyError(
            f"{layout.strategy.describe()} uses one of these {world.world_size} devices: there are no links to "
            f"measure. Choose a strategy over all of them."
        )
    transfers: list[Transfer] = []
    collective_s = 0.0
    if world.world_size > 1:
        # The largest group in which the strategy has collectives; pipelines return results over one.
        groups = (
            layout.ulysses,
            layout.ring,
            layout.sequence,
            layout.tensor,
            layout.row,
            layout.return_group,
        )
        used = max(groups, key=lambda axis: axis.size)
        ring = layout.ring if layout.ring.size > 1 else used
        ulysses = layout.ulysses if layout.ulysses.size > 1 else used
        _connect(world, ring, ulysses, message.thorough)
        meter = _Meter(world, message.budget_s, message.thorough)
        collective_s = meter.time_tiny_collective(used)
        for size in SIZES:  # small sizes of every kind first: they cost least and decide most
            transfers += meter.time_exchange(POINT_TO_POINT, size, partial(_to_next, size, ring, world))
            transfers += meter.time_exchange(ALL_TO_ALL, size, partial(_to_all, size, ulysses, world))
        if message.thorough:
            transfers += meter.time_pairs()
    return Calibration(
        rank=world.rank,
        backend="none" if world.group is None else dist.get_backend(world.group),
        strategy=layout.strategy,
        transfers=tuple(transfers),
        collective_s=collective_s,
        facts=_facts(world) if message.thorough else None,
    )


def _connect(world: World, ring: Axis, ulysses: Axis, thorough: bool) -> None:
    """Makes one small exchange of each kind to be measured, in the same order on all ranks."""
    _to_next(_BLOCK, ring, world)[0]()
    _to_all(_BLOCK * ulysses.size, ulysses, world)[0]()
    if thorough:
        for one, other in combinations(range(world.world_size), 2):
            _there_and_back(_BLOCK, one, other, world)[0]()


class _Meter:
    """Times exchanges until the budget is spent by rank 0's clock; then all ranks skip the rest."""

    def __init__(self, world: World, budget_s: float, thorough: bool) -> None:
        self._world = world
        self._ends = time.perf_counter() + budget_s
        self._share_s = budget_s * _SHARE
        self._thorough = thorough
        # (size, seconds) of the latest exchange of each kind; rank 0's values decide.
        self._last: dict[str, tuple[int, float]] = {}

    def time_tiny_collective(self, axis: Axis) -> float:
        """Returns the seconds of an all_reduce of one int, by the median batch."""
        flag = torch.zeros(1, dtype=torch.int32, device=self._world.device)

        def reduce() -> None:
            dist.all_reduce(flag, group=axis.group)

        self._batch(reduce, 1)
        once = self._batch(reduce, 1)
        count = self._agree(self._repetitions(once))
        return median(self._batch(reduce, count) for _ in range(BATCHES)) if count else once

    def time_exchange(self, kind: str, size: int, make: Callable[[], Prepared]) -> list[Transfer]:
        """Returns [the transfer], or [] if no time or no memory is left."""
        prepared: Prepared | None = None
        try:
            prepared = make()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
        agreed = self._agree(int(self._affordable(kind, size)), able=prepared is not None)
        if not agreed or prepared is None:
            return []
        exchange, expected, sent = prepared
        arrived = exchange()
        self._batch(exchange, 0)
        intact = not self._thorough or arrived is None or torch.equal(arrived, expected())
        began = time.perf_counter()
        once = self._batch(exchange, 1)
        self._meet()
        self._last[kind] = (size, time.perf_counter() - began)
        count = self._agree(self._repetitions(self._last[kind][1]))
        seconds = median(self._batch(exchange, count) for _ in range(BATCHES)) if count else once
        return [Transfer(kind, size, sent, seconds, intact=intact)]

    def time_pairs(self) -> list[Transfer]:
        """Times each pair of ranks alone, while the others wait; reports half of the time there and back."""
        found, rank = [], self._world.rank
        for (one, other), size in product(combinations(range(self._world.world_size), 2), SIZES):
            timed = self.time_exchange(PAIR, size, partial(_there_and_back, size, one, other, self._world))
            if rank in (one, other):
                peer = other if rank == one else one
                found += [Transfer(PAIR, size, size, t.seconds / 2, peer, t.intact) for t in timed]
        return found

    def _batch(self, exchange: Transmit, count: int) -> float:
        """Returns the mean seconds of `count` consecutive exchanges, which all ranks start at the same time."""
        self._meet()
        began = time.perf_counter()
        for _ in range(count):
            exchange()
        self._world.synchronize()
        return (time.perf_counter() - began) / max(1, count)

    def _repetitions(self, once: float) -> int:
        left = min(self._share_s, self._ends - time.perf_counter())
        return max(0, min(MOST_REPETITIONS, int(left / BATCHES / max(once, 1e-6))))

    def _affordable(self, kind: str, size: int) -> bool:
        before, seconds = self._last.get(kind, (size, 0.0))
        # Three times: one to warm up, one to time, and some room in case they are slower.
        return time.perf_counter() + 3 * seconds * max(1.0, size / before) < self._ends

    def _agree(self, wish: int, *, able: bool = True) -> int:
        """Returns rank 0's `wish`, or 0 if a rank is not able. Collective."""
        mine = 0 if not able else wish if self._world.rank == 0 else _ANY
        flag = torch.tensor([mine], dtype=torch.int32)
        dist.all_reduce(flag, op=dist.ReduceOp.MIN, group=self._world.control)
        return int(flag.item())

    def _meet(self) -> None:
        self._world.synchronize()
        dist.all_reduce(torch.zeros(1, dtype=torch.int32), group=self._world.control)


def _to_next(size: int, axis: Axis, world: World) -> Prepared:
    """Prepares a ring exchange: each rank sends to the next and receives from the one before."""
    following, before = axis.ranks[(axis.index + 1) % axis.size], axis.ranks[axis.index - 1]
    send, receive = _pattern(world.rank, size, world), _empty(size, world)

    def exchange() -> Tensor:
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, send, following, axis.group),
                dist.P2POp(dist.irecv, receive, before, axis.group),
            ]
        )
        for work in works:
            work.wait()
        return receive

    return exchange, lambda: _pattern(before, size, world), size


def _to_all(size: int, axis: Axis, world: World) -> Prepared:
    """Prepares an all-to-all as in Ulysses: each rank sends an equal part to every rank, itself included."""
    part = size // axis.size // _BLOCK * _BLOCK
    send, receive = _pattern(world.rank, part * axis.size, world), _empty(part * axis.size, world)

    def exchange() -> Tensor:
        dist.all_to_all_single(receive, send, group=axis.group)
        return receive

    def expected() -> Tensor:
        return torch.cat([_pattern(rank, part, world) for rank in axis.ranks])

    return exchange, expected, part * (axis.size - 1)


def _there_and_back(size: int, one: int, other: int, world: World) -> Prepared:
    """Prepares an exchange in which `one` sends to `other`, which sends as much back; other ranks do nothing."""
    if world.rank not in (one, other):
        return lambda: None, lambda: torch.empty(0), 0
    peer = other if world.rank == one else one
    send, receive = _pattern(world.rank, size, world), _empty(size, world)

    def exchange() -> Tensor:
        if world.rank == one:
            dist.send(send, peer, world.group)
            dist.recv(receive, peer, world.group)
        else:
            dist.recv(receive, peer, world.group)
            dist.send(send, peer, world.group)
        return receive

    return exchange, lambda: _pattern(peer, size, world), size


def _pattern(rank: int, size: int, world: World) -> Tensor:
    """Returns [size] uint8 that depends on the sending rank and on the position in a block."""
    block = (torch.arange(_BLOCK, device=world.device) % 251 + rank).to(torch.uint8)
    return block.repeat(size // _BLOCK)


def _empty(size: int, world: World) -> Tensor:
    # Zeros touch the pages, so that the first exchange does not pay for mapping them.
    return torch.zeros(size, dtype=torch.uint8, device=world.device)


def _facts(world: World) -> RankFacts:
    kernel, problem = _try_kernel(world.device)
    on_gpu = world.device.type == "cuda"
    return RankFacts(
        device_uuid=str(getattr(torch.cuda.get_device_properties(world.device), "uuid", ""))
        if on_gpu
        else "",
        peers=_peers(world),
        all_reduce_error=_all_reduce_error(world),
        kernel=kernel,
        kernel_problem=problem,
    )


def _peers(world: World) -> tuple[bool, ...]:
    """Returns, for each rank, True if this rank's device can read its memory; ranks on one device can."""
    index = world.device.index if world.device.type == "cuda" else -1
    indices = [torch.zeros(1, dtype=torch.int32) for _ in range(world.world_size)]
    if world.control is None:
        return (True,)
    dist.all_gather(indices, torch.tensor([index], dtype=torch.int32), group=world.control)
    device_indices = [int(device.item()) for device in indices]
    return tuple(
        index == device or torch.cuda.can_device_access_peer(index, device) for device in device_indices
    )


def _all_reduce_error(world: World) -> float:
    """Returns the largest error of an all_reduce of integers far below 2**24, whose exact sum is known."""
    if world.group is None:
        return 0.0
    pattern = (torch.arange(_SUM_ELEMENTS, device=world.device) % 251).float()
    total = pattern * (world.rank + 1)
    dist.all_reduce(total, group=world.group)
    error = (total - pattern * (world.world_size * (world.world_size + 1) // 2)).abs().max().item()
    return error if error < _REFUSED else _REFUSED  # a comparison with NaN is false


def _try_kernel(device: torch.device) -> tuple[str, str]:
    """Returns (name, problem) of the kernel for half precision here, from its test (kernel_choice.py)."""
    try:
        from ...engine.attention.kernel_choice import fault_of, kernel_for  # takes seconds: diffusers
        from ...engine.attention.kernels import HEAD_DIM

        choice = kernel_for(device, torch.bfloat16)
    except Exception as error:  # a build that does not fit this torch fails in its own way
        return "", f"{type(error).__name__}: {error}"[:500]
    fault = fault_of(choice.name, device, torch.bfloat16, False, HEAD_DIM)
    return "; ".join([choice.name, *choice.notes]), fault or ""
