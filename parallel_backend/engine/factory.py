"""Builds the forward of a model under a strategy: which groups, which engine, which kernel."""

from __future__ import annotations

from importlib.util import find_spec

from ..models.flux import FluxModel
from ..requests import Placement
from .attention import kernel_for
from .counting import Traffic
from .forward import ParallelForward
from .groups import Layout, Layouts
from .native import NativeAttention
from .pipeline import PipelineForward
from .weights import notes_on_weights


def make_forward(
    model: FluxModel, layouts: Layouts, placement: Placement
) -> ParallelForward | PipelineForward:
    """The forward of `model` under `placement`. Collective: all ranks call it together.

    `auto` is native: it is exact for every request and needs no import. Where xfuser is asked for, native stands behind
    it for what xfuser cannot compute exactly, and the notes say so.
    """
    layout = layouts.get(placement.strategy)
    forward = _make_forward(model, layout, placement.engine, layouts.traffic)
    forward.notes += notes_on_weights(layout)
    return forward


def _make_forward(
    model: FluxModel, layout: Layout, engine: str, traffic: Traffic
) -> ParallelForward | PipelineForward:
    kernel = kernel_for(model.device, model.compute_dtype)
    native = NativeAttention(layout, kernel, traffic)
    if layout.pipe.size > 1:
        pipeline = PipelineForward(model, layout, native, traffic)
        if engine == "xfuser":
            pipeline.notes.append(
                "engine xfuser stood back: its PipeFusion belongs to its own pipelines; native took its place"
            )
        return pipeline
    if engine != "xfuser":
        return ParallelForward(model, layout, [native], traffic)
    reason = _why_not_xfuser(layout)
    if reason is None:
        from .xfuser import XfuserAttention  # takes seconds to import, so only where it is asked for

        return ParallelForward(model, layout, [XfuserAttention(layout, kernel, traffic), native], traffic)
    forward = ParallelForward(model, layout, [native], traffic)
    forward.notes.append(f"engine xfuser stood back: {reason}; native took its place")
    return forward


def _why_not_xfuser(layout: Layout) -> str | None:
    if layout.tensor.size > 1:
        return "its tensor parallelism of Flux splits the feed-forward layers only"
    if layout.sequence.size == 1:
        return f"{layout.strategy.describe()} splits no tokens, which is all that it would compute"
    if find_spec("xfuser") is None:
        return "the package xfuser is not installed"
    return None
