"""Collectives over shares of different sizes, each over a group it is given, each counted in one place.

Tensors are split along their first dimension, so that what arrives is one contiguous tensor.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from .groups import Axis


@dataclass
class Traffic:
    """Payload bytes that left this rank: what it handed to collectives for other ranks, not counting protocol."""

    bytes_sent: int = 0

    def add(self, elements: int, like: Tensor) -> None:
        self.bytes_sent += elements * like.element_size()


def all_to_all(
    send: Tensor, send_sizes: tuple[int, ...], receive_sizes: tuple[int, ...], axis: Axis, traffic: Traffic
) -> Tensor:
    """Rows of `send` ([sum(send_sizes), …]) go to the ranks of the axis in order; returns [sum(receive_sizes), …]."""
    received = send.new_empty(sum(receive_sizes), *send.shape[1:])
    row = send[0].numel() if len(send) else 0
    traffic.add((sum(send_sizes) - send_sizes[axis.index]) * row, send)
    dist.all_to_all_single(received, send, list(receive_sizes), list(send_sizes), group=axis.group)
    return received


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
    dist.all_gather(list(gathered.chunk(axis.size)), padded, group=axis.group)
    if min(sizes) == largest:
        return gathered
    return torch.cat([gathered[i * largest : i * largest + size] for i, size in enumerate(sizes)])


def ring_shares(mine: Tensor, sizes: tuple[int, ...], axis: Axis, traffic: Traffic) -> Iterator[Tensor]:
    """Yields every rank's share, this rank's own first, as they travel round the ring.

    The hop of the next share runs while the caller works on the current one. `mine`: [sizes[index], …].
    """
    ranks, index, size = axis.ranks, axis.index, axis.size
    current = mine.contiguous()
    for hop in range(size):
        waiting, following = [], None
        if hop + 1 < size:
            following = mine.new_empty(sizes[(index - hop - 1) % size], *mine.shape[1:])
            traffic.add(current.numel(), current)
            waiting = dist.batch_isend_irecv(
                [
                    dist.P2POp(dist.isend, current, ranks[(index + 1) % size], axis.group),
                    dist.P2POp(dist.irecv, following, ranks[(index - 1) % size], axis.group),
                ]
            )
        yield current
        for work in waiting:
            work.wait()
        current = following
