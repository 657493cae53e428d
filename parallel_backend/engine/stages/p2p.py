"""Messages between the stages of a pipeline: sent without waiting, received in the order they were sent."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import torch.distributed as dist
from torch import Tensor

from ...wire.heartbeat import heartbeat
from ..comm.groups import Axis

_MOST_SENDS = 64


class P2PChannel:
    """A channel for messages between this rank and others of `axis`.

    An empty message is not sent: both sides know its size. Handles and tensors of unfinished sends are kept, because a
    tensor must stay alive during its transfer. With more than _MOST_SENDS of them, `send` waits for the oldest.
    """

    def __init__(self, axis: Axis) -> None:
        self._axis = axis
        self._leaving: deque[tuple[dist.Work, Tensor]] = deque()
        self._sent_in_round = 0

    def send(self, tensor: Tensor, to: int) -> None:
        """Starts to send `tensor`. `to`: the receiver's index in the axis."""
        if not tensor.numel():
            return
        tensor = tensor.contiguous()
        self._axis.traffic.add(tensor.numel(), tensor)
        work = dist.isend(tensor, self._axis.ranks[to], self._axis.group)
        assert work is not None, "this rank is in the group"
        self._leaving.append((work, tensor))
        self._sent_in_round += 1
        if len(self._leaving) > _MOST_SENDS:
            self._leaving.popleft()[0].wait()

    def receive(self, tensor: Tensor, source: int) -> Callable[[], Tensor]:
        """Starts to receive the next message of `source`, an index in the axis, into `tensor`; returns a function that
        waits for it."""
        if not tensor.numel():
            return lambda: tensor
        ranks = self._axis.ranks
        work = dist.irecv(tensor, ranks[source], self._axis.group)
        assert work is not None, "this rank is in the group"

        def arrive() -> Tensor:
            with heartbeat.inside("a PipeFusion hop", (ranks[self._axis.index], ranks[source])):
                work.wait()
            return tensor

        return arrive

    def end_round(self) -> None:
        """Waits until all messages sent before this round have left, which frees their memory.

        A rank at the end of a round has received the answers to the previous round, so this does not delay it.
        """
        while len(self._leaving) > self._sent_in_round:
            self._leaving.popleft()[0].wait()
        self._sent_in_round = 0

    def settle(self) -> None:
        """Waits until all messages have left."""
        while self._leaving:
            self._leaving.popleft()[0].wait()
