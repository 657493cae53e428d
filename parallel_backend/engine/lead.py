"""Model calls by the first of several ranks alone, as one device makes them; the others wait for what it gives."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from ..options import THREADS_ALONE
from ..requests import Rows
from .comm.collectives import broadcast
from .comm.groups import Axis
from .forward import ParallelForward


class LeadForward:
    """As ParallelForward, of which the first rank makes the calls; the velocities are complete on every rank."""

    patchwise = None  # all steps are exact

    def __init__(self, forward: ParallelForward, everyone: Axis) -> None:
        """`forward`: over this rank alone; only the first one uses it."""
        self._forward = forward
        self._everyone = everyone
        self.device = forward.device
        self.model = forward.model
        self.notes = forward.notes

    def __call__(self, rows: list[Rows]) -> list[Tensor]:
        counts = [len(entry.x) for entry in rows]
        like = rows[0].x
        if self._everyone.index == 0:
            with all_threads(self.device):
                velocities = torch.cat(self._forward(rows))
        else:
            shape = (sum(counts), self.model.latent_channels, *like.shape[2:])
            velocities = torch.empty(shape, dtype=torch.float32, device=self.device)
        return list(broadcast(velocities, 0, self._everyone, self._forward.traffic).split(counts))

    def from_first(self, tensor: Tensor) -> Tensor:
        return broadcast(tensor, 0, self._everyone, self._forward.traffic)

    @property
    def engine(self) -> str:
        return self._forward.engine

    @property
    def kernel(self) -> str:
        return self._forward.kernel

    @property
    def bytes_sent(self) -> int:
        return self._forward.bytes_sent

    @property
    def compiles(self) -> bool:
        return self._forward.compiles

    @property
    def exact(self) -> bool:
        return self._forward.exact


@contextmanager
def all_threads(device: torch.device) -> Iterator[None]:
    """Inside, torch computes on the CPU with as many threads as a rank has that is not one of several."""
    alone = int(os.environ.get(THREADS_ALONE, "0"))
    before = torch.get_num_threads()
    if device.type != "cpu" or alone <= before:
        yield
        return
    torch.set_num_threads(alone)
    try:
        yield
    finally:
        torch.set_num_threads(before)
