"""Collectives over shares of different sizes. Each takes the axis of its ranks, which counts what they send.

Tensors travel split along their first dimension, so the received data is one contiguous tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from ...wire.heartbeat import heartbeat
from .groups import Axis, is_gloo

# torch 2.13 renamed it and warns about the old name.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def start_all_to_all(
    send: Tensor,
    send_sizes: tuple[int, ...],
    receive_sizes: tuple[int, ...],
    axis: Axis,
    *,
    overlaps: bool,
) -> Callable[[], Tensor]:
    """Starts to send rows of `send` [sum(send_sizes), …] to the ranks of the axis in order; returns a function that
    waits for [sum(receive_sizes), …]. `overlaps`: the caller computes meanwhile."""
    received = send.new_empty(sum(receive_sizes), *send.shape[1:])
    row = send[0].numel() if len(send) else 0
    axis.traffic.add((sum(send_sizes) - send_sizes[axis.index]) * row, send)
    sizes = (list(receive_sizes), list(send_sizes))
    with heartbeat.inside("an all-to-all", axis.ranks):  # a group's first collective makes its communicator
        work = dist.all_to_all_single(received, send, *sizes, group=axis.group, async_op=overlaps)

    def arrive() -> Tensor:
        if work is not None:
            with heartbeat.inside("an all-to-all", axis.ranks):
                work.wait()
        return received

    return arrive


def gather_on_first(mine: Tensor, sizes: tuple[int, ...], axis: Axis) -> Tensor:
    """Gathers [sizes[index], …] of each rank into [sum(sizes), …] on the first rank, and [0, …] on the others."""
    if axis.group is None:
        return mine
    nothing = (0,) * (axis.size - 1)
    receive = sizes if axis.index == 0 else (0, *nothing)
    return start_all_to_all(mine, (len(mine), *nothing), receive, axis, overlaps=False)()


def all_gather(mine: Tensor, sizes: tuple[int, ...], axis: Axis, dim: int = 0) -> Tensor:
    """Gathers [sizes[index], …] of each rank into [sum(sizes), …] on every rank, or the same of another `dim`. Sends
    shares padded to the largest."""
    if axis.group is None:
        return mine
    if dim:
        return all_gather(mine.movedim(dim, 0), sizes, axis).movedim(0, dim)
    largest = max(sizes)
    padded = mine.contiguous()
    if len(mine) < largest:
        padded = torch.cat([mine, mine.new_zeros(largest - len(mine), *mine.shape[1:])])
    gathered = mine.new_empty(axis.size * largest, *mine.shape[1:])
    axis.traffic.add(padded.numel() * (axis.size - 1), padded)
    with heartbeat.inside("an all-gather", axis.ranks):
        if is_gloo(axis, mine.device):
            dist.all_gather(list(gathered.chunk(axis.size)), padded, group=axis.group)
        else:  # given a list, NCCL copies from a second tensor as large as the whole
            all_gather_single(gathered, padded, group=axis.group)
    if min(sizes) == largest:
        return gathered
    return torch.cat([gathered[i * largest : i * largest + size] for i, size in enumerate(sizes)])


def broadcast(tensor: Tensor, source: int, axis: Axis) -> Tensor:
    """Returns the tensor of rank `source` (an index in the axis); the others pass one of that shape and dtype."""
    if axis.group is None or not tensor.numel():
        return tensor
    axis.traffic.add(tensor.numel() * (axis.size - 1) if axis.index == source else 0, tensor)
    with heartbeat.inside("a broadcast", axis.ranks):
        dist.broadcast(tensor, axis.ranks[source], group=axis.group)
    return tensor


def all_reduce(tensor: Tensor, axis: Axis) -> Tensor:
    """Sums a tensor over the axis, in place, on every rank.

    Counted as sent by a ring: 2 (P - 1) / P of the tensor, the least of any algorithm (Patarasuk and Yuan 2009).
    """
    if axis.group is not None and tensor.numel():
        axis.traffic.add(2 * (axis.size - 1) * tensor.numel() // axis.size, tensor)
        with heartbeat.inside("an all-reduce", axis.ranks):
            dist.all_reduce(tensor, group=axis.group)
    return tensor


def ring_shares(mine: Tensor, sizes: tuple[int, ...], axis: Axis) -> Iterator[Tensor]:
    """Yields the share of every rank in the order in which the ring brings them, this rank's own first.

    The next share is on its way while the caller works on the current one. `mine`: [sizes[index], …].
    """
    ranks, index, size = axis.ranks, axis.index, axis.size
    current = mine.contiguous()
    for hop in range(1, size):
        following = mine.new_empty(sizes[(index - hop) % size], *mine.shape[1:])
        axis.traffic.add(current.numel(), current)
        operations = []  # an empty share is not sent: both sides know its size
        if current.numel():
            operations.append(dist.P2POp(dist.isend, current, ranks[(index + 1) % size], axis.group))
        if following.numel():
            operations.append(dist.P2POp(dist.irecv, following, ranks[(index - 1) % size], axis.group))
        waiting = dist.batch_isend_irecv(operations) if operations else []
        yield current
        if waiting:
            with heartbeat.inside("a ring step", (ranks[index], ranks[(index - 1) % size])):
                for work in waiting:
                    work.wait()
        current = following
    yield current
