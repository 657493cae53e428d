"""Tensor parallelism's meeting points: how the ranks of the tensor axis put their slices' results together."""

from __future__ import annotations

from torch import Tensor

from ..models.flux.tensor_parallel import Slices
from .collectives import Traffic, all_gather, all_reduce
from .groups import Axis
from .operators import meeting_of_slices


def slices_of(axis: Axis, traffic: Traffic) -> Slices | None:
    """This rank's slices of every layer; None where the axis has one rank."""
    if axis.size == 1:
        return None

    def add_up(partial: Tensor) -> Tensor:
        return all_reduce(partial, axis, traffic)

    def join(columns: Tensor) -> Tensor:
        """[B, n] of each rank -> [B, P * n]; columns go first on the wire."""
        sizes = (columns.shape[1],) * axis.size
        return all_gather(columns.T, sizes, axis, traffic).T

    return Slices(axis.size, axis.index, *meeting_of_slices(f"ranks {axis.ranks}", axis.size, add_up, join))
