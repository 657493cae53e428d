"""A test-only pack that changes networks in the ways that other packs do, and undoes the changes; the nodes that do so
are in inject_nodes."""

from __future__ import annotations

import sys

import torch

from . import ways  # noqa: F401, the nodes find it among the loaded modules

NODE_CLASS_MAPPINGS: dict[str, type] = {}

if torch.distributed.is_initialized():  # in a rank: attention is shared out even of a tiny model
    sys.modules["parallel_backend.engine.attention.queries"].MIN_KEYS = 1
