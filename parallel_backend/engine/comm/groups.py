"""Rank groups: the process group of a sidecar, and a strategy's subgroups of it."""

from __future__ import annotations

import os
from dataclasses import InitVar, dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...errors import PlatformError, RequestError
from ...layout import AXES, REPLICA_AXES, ROW_AXES, SEQUENCE_AXES, RankCoordinates
from ...models.base import Slices
from ...strategy import ParallelStrategy
from ...wire.heartbeat import heartbeat
from ...wire.protocol import SHARED_STORE
from .numa import stay_near

_NO_INTERFACE = "Unable to find address for"  # in gloo's error message
# The timeout of every group, and of the store through which NCCL's ranks find each other. A collective waits for the
# slowest rank, which may be compiling. The supervisor limits that time by what is computed (wire/deadlines.py), and
# names the rank that the others wait for. torch's own timeouts, 5 and 10 minutes, would end the waiting ranks.
PATIENCE = timedelta(days=1)
# Purposes of separate groups: to gather weights, and to return answers from the last stage to the first.
_WEIGHTS, _RETURN = "weights", "return"


@dataclass(eq=False, kw_only=True)
class World:
    """This rank's place in its sidecar and the process groups that span it.

    `group` carries tensors (NCCL on GPUs, gloo on the CPU). `control` is always gloo, for flags that the host reads.
    Both are None for a single rank. `store_path`: a fresh path for a FileStore (which opens no port), or a prefix in
    torchrun's store; `devices`: those of all ranks.
    """

    rank: int
    world_size: int
    device: torch.device
    backend: InitVar[str]
    store_path: InitVar[str]
    devices: tuple[torch.device, ...] = ()
    group: dist.ProcessGroup | None = field(init=False, default=None)
    control: dist.ProcessGroup | None = field(init=False, default=None)

    def __post_init__(self, backend: str, store_path: str) -> None:
        size, device = self.world_size, self.device
        self.devices = self.devices or (device,)
        if device.type == "cuda":
            torch.cuda.set_device(device)
            stay_near(device)
            choose_device = partial(torch.cuda.set_device, device)
            heartbeat.follow(partial(torch.cuda.Event, enable_timing=True), choose_device)
        if size > 1:
            store = _open_store(store_path, size)
            store.set_timeout(PATIENCE)
            try:
                dist.init_process_group(
                    backend, store=store, rank=self.rank, world_size=size, timeout=PATIENCE
                )
                self.group = dist.group.WORLD
                self.control = (
                    self.group if backend == "gloo" else dist.new_group(backend="gloo", timeout=PATIENCE)
                )
            except RuntimeError as error:
                if _NO_INTERFACE not in str(error):
                    raise
                raise PlatformError(
                    "The processes meet over this machine's loopback network interface, and lo is down or missing. "
                    "Bring it up (ip link set lo up), or start the container or sandbox with one."
                ) from error

    def synchronize(self) -> None:
        """Waits for all that this rank's GPU was given to do; the CPU has done it already."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _open_store(path: str, world_size: int) -> Any:
    """Opens a file store, or a prefix in the store of torchrun's agents, which ranks on several machines can reach.
    (torch exports the stores, but not to type checkers.)"""
    if not path.startswith(SHARED_STORE):
        return dist.FileStore(path, world_size)  # type: ignore[attr-defined]
    store = dist.TCPStore(  # type: ignore[attr-defined]
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=False,  # the master is the agent, or torchrun's first process (rank/joined/join.py)
    )
    return dist.PrefixStore(path.removeprefix(SHARED_STORE), store)  # type: ignore[attr-defined]


@dataclass
class Traffic:
    """Payload bytes that this rank gave to collectives for other ranks, without protocol overhead.

    `collectives`: the number of collectives that it started.
    """

    bytes_sent: int = 0
    collectives: int = 0

    def add(self, elements: int, like: Tensor) -> None:
        """Counts a collective, or a hop of one, that sends `elements` of the dtype of `like` to other ranks."""
        self.collectives += 1
        self.bytes_sent += elements * like.element_size()


@dataclass(frozen=True)
class Axis:
    """One group of ranks. `ranks`: global ranks in order; `index`: this rank's; `group`: None for a single rank;
    `traffic`: counts what this rank sends over it, together with the other axes that share it."""

    ranks: tuple[int, ...]
    index: int
    group: dist.ProcessGroup | None
    traffic: Traffic = field(default_factory=Traffic, compare=False)

    @property
    def size(self) -> int:
        return len(self.ranks)


ALONE = Axis((0,), 0, None)  # for a rank that shares nothing with other ranks


@dataclass(frozen=True)
class Layout:
    """The groups of one strategy that this rank is in.

    `row` shares out whole images (data x cfg), `pipe` the blocks of the model, `sequence` the tokens of one image
    (ring x ulysses), `tensor` the heads and columns of each layer. `return_group` has the ranks of `pipe`: within one
    NCCL group the last stage's answers would queue behind the tensors that stages pass on. `shard` has the ranks that
    share out the same weights, or only this rank if weights are not sharded; as a separate group it does not queue
    behind tokens. `everyone` has all ranks.
    """

    strategy: ParallelStrategy
    world: World
    row: Axis
    pipe: Axis
    return_group: Axis
    sequence: Axis
    ring: Axis
    ulysses: Axis
    tensor: Axis
    shard: Axis
    everyone: Axis

    @property
    def sequence_shares(self) -> tuple[float, ...]:
        """The share of an image's tokens that each rank of a sequence axis takes; empty for equal shares."""
        return self._coordinates.sequence_shares(self.strategy)

    @property
    def stage_shares(self) -> tuple[float, ...]:
        """The share of the model's blocks that each stage of this rank's pipeline takes."""
        return self._coordinates.stage_shares(self.strategy)

    @property
    def _coordinates(self) -> RankCoordinates:
        return RankCoordinates.of(self.strategy, self.world.rank)


class Layouts:
    """The layouts over a world, made once per strategy. All ranks must get the same strategies in the same order.

    `traffic`: counts what this rank sends over any of them; `slices`: this rank's, by the ranks of a tensor axis.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self.traffic = Traffic()
        self.slices: dict[tuple[int, ...], Slices] = {}
        self._layouts: dict[ParallelStrategy, Layout] = {}
        self._groups: dict[tuple[tuple[int, ...], str], dist.ProcessGroup] = {}

    @property
    def everyone(self) -> Axis:
        """The axis of all ranks."""
        world = self.world
        return Axis(tuple(range(world.world_size)), world.rank, world.group, self.traffic)

    def get(self, strategy: ParallelStrategy) -> Layout:
        """Returns the layout of `strategy`. If that has one rank and the world has more, every rank gets a layout
        for itself, and rank 0 computes (rank/work/meeting.py). Raises RequestError for any other number of ranks."""
        if strategy.world_size not in (1, self.world.world_size):
            raise RequestError(
                f"{strategy.describe()} needs {strategy.world_size} ranks and this group has {self.world.world_size}."
            )
        if strategy not in self._layouts:
            self._layouts[strategy] = Layout(
                strategy,
                self.world,
                row=self._axis(strategy, ROW_AXES),
                pipe=self._axis(strategy, ("pipefusion",)),
                return_group=self._axis(strategy, ("pipefusion",), purpose=_RETURN),
                sequence=self._axis(strategy, SEQUENCE_AXES),
                ring=self._axis(strategy, ("ring",)),
                ulysses=self._axis(strategy, ("ulysses",)),
                tensor=self._axis(strategy, ("tensor",)),
                shard=self._axis(strategy, REPLICA_AXES if strategy.shards else (), purpose=_WEIGHTS),
                everyone=self._axis(strategy, AXES),
            )
            _connect_stages(self._layouts[strategy])
        return self._layouts[strategy]

    def _axis(self, strategy: ParallelStrategy, axes: tuple[str, ...], purpose: str = "") -> Axis:
        mine = None
        if strategy.world_size < self.world.world_size:
            return Axis((self.world.rank,), 0, None, self.traffic)
        for ranks in rank_groups(strategy, axes):
            group = self.group(ranks, purpose)
            if self.world.rank in ranks:
                mine = Axis(ranks, ranks.index(self.world.rank), group, self.traffic)
        assert mine is not None, "every rank is in one group of each axis"
        return mine

    def group(self, ranks: tuple[int, ...], purpose: str = "") -> dist.ProcessGroup | None:
        """Returns the group of these ranks, made once: torch never frees a group's threads and descriptors.
        Collective: every rank, member or not, calls this for every group in the same order."""
        if len(ranks) == 1:
            return None
        if len(ranks) == self.world.world_size and not purpose:
            return self.world.group
        if (ranks, purpose) not in self._groups:
            self._groups[ranks, purpose] = dist.new_group(list(ranks), timeout=PATIENCE)
        return self._groups[ranks, purpose]


def _connect_stages(layout: Layout) -> None:
    """Sends one message between every two stages that will communicate, in the same order on all ranks.

    At the first send between two ranks NCCL makes their communicator, and each host waits for the other. During a run a
    stage may be waiting for something else, and the pipeline would hang. Process groups are made without a `device_id`:
    with one, all pairs would share a communicator and their messages would wait for each other.
    """
    last = layout.pipe.size - 1
    meetings = [(layout.pipe, stage, stage + 1) for stage in range(last)]
    if last > 0:
        meetings.append((layout.return_group, last, 0))
    token = torch.zeros(1, device=layout.world.device)
    for axis, sender, receiver in meetings:
        with heartbeat.inside("a PipeFusion hop", (axis.ranks[sender], axis.ranks[receiver])):
            if axis.index == sender:
                dist.send(token, axis.ranks[receiver], axis.group)
            elif axis.index == receiver:
                dist.recv(token, axis.ranks[sender], axis.group)


def is_gloo(axis: Axis, device: torch.device) -> bool:
    """Returns True if gloo carries (or for a single rank would carry) tensors on `device` over the axis."""
    if axis.group is None:
        return device.type == "cpu"
    return dist.get_backend(axis.group) == dist.Backend.GLOO


def rank_groups(strategy: ParallelStrategy, axes: tuple[str, ...]) -> list[tuple[int, ...]]:
    """Returns the global ranks of every group over `axes`: ranks with the same coordinates on all other axes."""
    others = tuple(axis for axis in AXES if axis not in axes)
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank in range(strategy.world_size):
        groups.setdefault(RankCoordinates.of(strategy, rank).on(others), []).append(rank)
    return [tuple(ranks) for ranks in groups.values()]
