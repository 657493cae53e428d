"""A test-only pack that changes networks in the ways that other packs do, and undoes the changes."""

from __future__ import annotations

import sys

import torch
from comfy_api.latest import ComfyExtension, io

from .node import TestPatience, TestReach, TestUndo


class WaysExtension(ComfyExtension):
    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        return [TestPatience, TestReach, TestUndo]


async def comfy_entrypoint() -> WaysExtension:
    return WaysExtension()


def share_small_attention() -> None:
    """Makes the ranks split attention among devices even for a tiny model; does nothing in ComfyUI's process."""
    if torch.distributed.is_initialized():
        sys.modules["parallel_backend.engine.attention.queries"].MIN_KEYS = 1


share_small_attention()
