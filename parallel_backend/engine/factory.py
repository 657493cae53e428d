"""Builds the forward of a model under a strategy: which groups, which engine, which kernel."""

from __future__ import annotations

from ..models.flux import FluxModel
from ..requests import Placement
from .attention import kernel_for
from .collectives import Traffic
from .forward import ParallelForward
from .groups import Layouts
from .native import NativeAttention


def make_forward(model: FluxModel, layouts: Layouts, placement: Placement) -> ParallelForward:
    """The forward of `model` under `placement`. Collective: all ranks call it together."""
    layout = layouts.get(placement.strategy)
    traffic = Traffic()
    kernel = kernel_for(model.device, model.compute_dtype)
    return ParallelForward(model, layout, [NativeAttention(layout, kernel, traffic)], traffic)
