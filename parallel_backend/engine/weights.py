"""Which part of a model each rank of a strategy holds, and how it gets it from the file."""

from __future__ import annotations

from ..flux_file import inspect_flux
from ..models.flux import FluxModel, load
from ..requests import ModelSpec
from ..stages import split_blocks
from ..strategy import ParallelStrategy
from .groups import Layout, Layouts


def load_under(spec: ModelSpec, layouts: Layouts, strategy: ParallelStrategy) -> FluxModel:
    """This rank's part of `spec` under `strategy`. Raises CheckpointError for a file that is refused.

    Collective where ranks hold different parts: all ranks call it together.
    """
    if strategy.weights == ParallelStrategy():
        return load(spec, layouts.world.device)
    layout = layouts.get(strategy)
    return load(spec, layouts.world.device, _stage(spec, layout))


def _stage(spec: ModelSpec, layout: Layout) -> tuple[range, ...] | None:
    """The chunks of blocks of this rank's pipeline stage; None for the whole model."""
    if layout.pipe.size == 1:
        return None
    dims = inspect_flux(spec.path).dims
    shares = layout.strategy.device_shares
    by_stage = tuple(shares[rank] for rank in layout.pipe.ranks) if shares else (1.0,) * layout.pipe.size
    return split_blocks(dims.double_blocks, dims.single_blocks, by_stage)[layout.pipe.index]
