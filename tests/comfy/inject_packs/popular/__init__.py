"""A test-only pack that changes models, guiders and samplers in the ways of popular packs."""

from __future__ import annotations

from . import cache, models, sampling, state, variables  # noqa: F401, they register their nodes
from .node import NODE_CLASS_MAPPINGS  # noqa: F401, ComfyUI reads it
