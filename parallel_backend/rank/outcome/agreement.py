"""Agreement of all ranks on one outcome: that each could do its part, and that all do the same."""

from __future__ import annotations

import torch
import torch.distributed as dist

from ...engine.comm.groups import World
from ...errors import RequestError
from ...wire.heartbeat import heartbeat
from .errors import PeerFailed

_LOWEST = -(2**62)


class RanksApart(PeerFailed):
    """Raised on all ranks if one failed, or if they do different things (`differs`, without a failure)."""

    def __init__(self, words: str, differs: bool = False) -> None:
        super().__init__(words)
        self.differs = differs


def worst_outcome(world: World, outcome: int, on: str) -> int:
    """Returns the highest `outcome` of all ranks; `on`: what they agree on, in words. Collective."""
    worst = torch.tensor([outcome], dtype=torch.int32)
    if world.control is not None:
        with heartbeat.inside(f"the agreement on a {on}", range(world.world_size)):
            dist.all_reduce(worst, dist.ReduceOp.MAX, group=world.control)
    return int(worst)


def agree(world: World, error: BaseException | None) -> None:
    """Raises `error` on the rank that has one, and PeerFailed on the other ranks. Collective."""
    failed = worst_outcome(world, int(error is not None), "job")
    if error is not None:
        raise error
    if failed:
        raise PeerFailed("another process could not run the job")


def agree_on_call(world: World, failed: bool, number: int, form: int, value: int = 0) -> int:
    """Agrees with the other ranks that all make the same call of the network (`number` and `form`). All ranks call this
    before each call and at the end; one that has `failed` does too, so that no rank waits for it. Returns rank 0's
    64-bit `value`. Raises RanksApart on all ranks or on none. Collective."""
    if world.control is None:
        return value
    same = [0, number, -number, form, -form]
    halves = [value >> 32, value & 0xFFFFFFFF] if world.rank == 0 else [_LOWEST] * 2
    words = torch.tensor([1, *[_LOWEST] * 6] if failed else [*same, *halves], dtype=torch.int64)
    with heartbeat.inside("the agreement on a model call", range(world.world_size)):
        dist.all_reduce(words, dist.ReduceOp.MAX, group=world.control)
    found = words.tolist()
    if found[0]:
        raise RanksApart("another process could not run the job")
    if found[: len(same)] != same:
        raise RanksApart(
            "The devices went different ways: a sampler or a node decides by values that differ between them. Take "
            "that node out, or choose one device for this prompt.",
            differs=True,
        )
    return int(found[-2] << 32 | found[-1])


def leave(world: World, error: Exception | None) -> None:
    """Ends a job. Raises `error`, PeerFailed if another rank failed, RequestError if the ranks differ. Collective."""
    if isinstance(error, RanksApart):  # all ranks raised it together
        apart = error
    else:
        try:
            agree_on_call(world, error is not None, 0, 0)
        except RanksApart as found:
            apart = found
        else:
            if error is not None:  # a single rank has no other to agree with
                raise error
            return
    agree(world, None if error is apart else error)
    raise RequestError(str(apart)) if apart.differs else apart
