"""Builds the forward of a model under a strategy: which groups, which engine, which kernel."""

from __future__ import annotations

from ..models.base import TokenModel
from ..options import ComputeOptions, overlaps
from ..requests import Placement
from .attention.kernel_choice import kernel_for
from .attention.native import NativeAttention
from .attention.usp import why_not_xfuser
from .blocks.compile import Blocks, CompiledBlocks, PlainBlocks, start_compiler
from .comm.groups import Layout, Layouts
from .comm.traffic_counter import Traffic
from .forward import ParallelForward
from .lead import LeadForward
from .load import notes_on_weights
from .pipefusion.forward import PipelineForward

AnyForward = ParallelForward | PipelineForward | LeadForward


def make_forward(model: TokenModel, layouts: Layouts, placement: Placement) -> AnyForward:
    """The forward of `model` under `placement`. Collective: all ranks call it together.

    `auto` is native: it is exact for every request and needs no import. Where xfuser is asked for, native stands behind
    it for what xfuser cannot compute exactly, and the notes say so.
    """
    layout = layouts.get(placement.strategy)
    wish = placement.compute_options.attention
    kernel = kernel_for(model.device, model.compute_dtype, wish, ring=layout.ring.size > 1)
    blocks, notes = _blocks(model, placement.compute_options)
    forward = _make_forward(model, layout, placement.engine, kernel.name, blocks, layouts.traffic)
    forward.notes += notes_on_weights(layout) + kernel.notes + notes
    if placement.strategy.world_size < layouts.world.world_size:
        assert isinstance(forward, ParallelForward), "one device has no stages"
        return LeadForward(forward, layouts.everyone)
    return forward


def _blocks(model: TokenModel, compute_options: ComputeOptions) -> tuple[Blocks, list[str]]:
    """Blocks that run as was asked for, or plain ones, and what there is to say about it."""
    if not compute_options.compiles:
        return PlainBlocks(), []
    compiler, notes = start_compiler(model.device.type)
    return PlainBlocks() if compiler is None else CompiledBlocks(compiler), notes


def _make_forward(
    model: TokenModel, layout: Layout, engine: str, kernel: str, blocks: Blocks, traffic: Traffic
) -> ParallelForward | PipelineForward:
    native = NativeAttention(layout, kernel, traffic, overlaps=overlaps(model.device.type))
    if layout.pipe.size > 1:
        pipeline = PipelineForward(model, layout, native, traffic, blocks)
        if engine == "xfuser":
            pipeline.notes.append(f"engine xfuser fell back to native: {why_not_xfuser(layout)}")
        return pipeline
    if engine != "xfuser":
        return ParallelForward(model, layout, [native], traffic, blocks)
    reason = why_not_xfuser(layout)
    if not reason:
        from .attention.xfuser import (
            XfuserAttention,  # takes seconds to import, so only where it is asked for
        )

        xfuser = XfuserAttention(layout, kernel, traffic)
        return ParallelForward(model, layout, [xfuser, native], traffic, blocks)
    forward = ParallelForward(model, layout, [native], traffic, blocks)
    forward.notes.append(f"engine xfuser fell back to native: {reason}")
    return forward
