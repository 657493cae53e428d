"""Loading under a strategy: each rank loads its part of a model from the file."""

from __future__ import annotations

from ..models.base import ModelPart, ModuleModel
from ..models.registry import inspect_model, load_model
from ..requests import ModelSpec
from ..strategy import ParallelStrategy
from .comm.groups import Layout, Layouts
from .sharding import ByteSharding
from .tensor_parallel import slices_of


def load_under(spec: ModelSpec, layouts: Layouts, strategy: ParallelStrategy) -> ModuleModel:
    """Loads this rank's part of `spec` under `strategy`. Raises CheckpointError for a file that is refused.

    Collective if ranks hold different parts: all ranks call it together. Only making the groups is a collective, and it
    comes first. So a rank that then fails on the file or runs out of memory does not leave the others waiting.
    """
    device, peers, strategy = layouts.world.device, layouts.world.devices, strategy.weights
    if strategy == ParallelStrategy():
        return load_model(spec, device, peers=peers)
    layout = layouts.get(strategy)
    strategy.check(inspect_model(spec.path, spec.family).shape, layouts.world.world_size)
    shared = None
    # A single rank on the CPU can neither shard nor offload.
    if strategy.shards and (layout.shard.size > 1 or device.type != "cpu"):
        shared = ByteSharding(layout.shard, device, offload=strategy.offload_weights)
    part = ModelPart(layout.pipe.index, layout.stage_shares, slices_of(layout.tensor, layouts), shared)
    return load_model(spec, device, part, peers)


def notes_on_weights(layout: Layout) -> list[str]:
    """Returns notes, worded for users, on requested weight options that have no effect here."""
    strategy, on_cpu = layout.strategy, layout.world.device.type == "cpu"
    notes = []
    if strategy.offload_weights and on_cpu:
        notes.append("offload_weights changes nothing on the CPU: weights are in host memory anyway")
    if strategy.shard_weights and layout.shard.size == 1 and (on_cpu or not strategy.offload_weights):
        notes.append(
            f"shard_weights changes nothing under {strategy.describe()}: no two devices hold the same"
        )
    return notes
