"""Collectives over shares of different sizes, each over a group it is given, each counted in one place.

Tensors are split along their first dimension, so that what arrives is one contiguous tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...wire.heartbeat import heartbeat
from .groups import Axis, is_gloo
from .traffic_counter import Traffic

# Its name before torch 2.13 warns in that version.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def all_to_all(
    send: Tensor, send_sizes: tuple[int, ...], receive_sizes: tuple[int, ...], axis: Axis, traffic: Traffic
) -> Tensor:
    """Rows of `send` ([sum(send_sizes), …]) go to the ranks of the axis in order; returns [sum(receive_sizes), …]."""
    received, begin = _all_to_all(send, send_sizes, receive_sizes, axis, traffic)
    with heartbeat.inside("an all-to-all", axis.ranks):
        begin(async_op=False)
    return received


def start_all_to_all(
    send: Tensor, send_sizes: tuple[int, ...], receive_sizes: tuple[int, ...], axis: Axis, traffic: Traffic
) -> Callable[[], Tensor]:
    """Begins all_to_all; the function that is returned waits for it. What is computed between flies beside it."""
    received, begin = _all_to_all(send, send_sizes, receive_sizes, axis, traffic)
    with heartbeat.inside("an all-to-all", axis.ranks):  # the first one of a group makes its communicator
        work = begin(async_op=True)

    def arrive() -> Tensor:
        with heartbeat.inside("an all-to-all", axis.ranks):
            work.wait()
        return received

    return arrive


def _all_to_all(
    send: Tensor, send_sizes: tuple[int, ...], receive_sizes: tuple[int, ...], axis: Axis, traffic: Traffic
) -> tuple[Tensor, Callable[..., Any]]:
    """(what will be received, a function that begins it)"""
    received = send.new_empty(sum(receive_sizes), *send.shape[1:])
    row = send[0].numel() if len(send) else 0
    traffic.add((sum(send_sizes) - send_sizes[axis.index]) * row, send)
    sizes = (list(receive_sizes), list(send_sizes))
    return received, partial(dist.all_to_all_single, received, send, *sizes, group=axis.group)


def all_gather(mine: Tensor, sizes: tuple[int, ...], axis: Axis, traffic: Traffic) -> Tensor:
    """[sizes[index], …] of each rank -> [sum(sizes), …] on every rank. Shares are padded to the largest on the way."""
    if axis.group is None:
        return mine
    largest = max(sizes)
    padded = mine.contiguous()
    if len(mine) < largest:
        padded = torch.cat([mine, mine.new_zeros(largest - len(mine), *mine.shape[1:])])
    gathered = mine.new_empty(axis.size * largest, *mine.shape[1:])
    traffic.add(padded.numel() * (axis.size - 1), padded)
    with heartbeat.inside("an all-gather", axis.ranks):
        if is_gloo(axis, mine.device):
            dist.all_gather(list(gathered.chunk(axis.size)), padded, group=axis.group)
        else:  # into a list NCCL copies out of a second tensor as large as all of that
            all_gather_single(gathered, padded, group=axis.group)
    if min(sizes) == largest:
        return gathered
    return torch.cat([gathered[i * largest : i * largest + size] for i, size in enumerate(sizes)])


def broadcast(tensor: Tensor, source: int, axis: Axis, traffic: Traffic) -> Tensor:
    """The tensor of rank `source` (an index in the axis) on every rank; the others give one of its shape and dtype."""
    if axis.group is None or not tensor.numel():
        return tensor
    traffic.add(tensor.numel() * (axis.size - 1) if axis.index == source else 0, tensor)
    with heartbeat.inside("a broadcast", axis.ranks):
        dist.broadcast(tensor, axis.ranks[source], group=axis.group)
    return tensor


def all_reduce(tensor: Tensor, axis: Axis, traffic: Traffic) -> Tensor:
    """The sum over the axis, in place, on every rank.

    Counted as a ring sends it: 2 (P - 1) / P of the tensor, the least that any algorithm can (Patarasuk and Yuan 2009).
    """
    if axis.group is not None and tensor.numel():
        traffic.add(2 * (axis.size - 1) * tensor.numel() // axis.size, tensor)
        with heartbeat.inside("an all-reduce", axis.ranks):
            dist.all_reduce(tensor, group=axis.group)
    return tensor


def ring_shares(mine: Tensor, sizes: tuple[int, ...], axis: Axis, traffic: Traffic) -> Iterator[Tensor]:
    """Yields every rank's share, this rank's own first, as they travel round the ring.

    The hop of the next share runs while the caller works on the current one. `mine`: [sizes[index], …].
    """
    ranks, index, size = axis.ranks, axis.index, axis.size
    current = mine.contiguous()
    for hop in range(1, size):
        following = mine.new_empty(sizes[(index - hop) % size], *mine.shape[1:])
        traffic.add(current.numel(), current)
        operations = []  # none for a share without elements: both sides know its size
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
