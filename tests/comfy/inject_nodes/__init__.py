"""Test-only nodes: they make tiny models, conditioning and latents, save results, and change models and ranks.

Drawn conditioning and latents replace text encoder and VAE, so that a test compares samplers and nothing else.
"""

from __future__ import annotations

import os

from comfy_api.latest import ComfyExtension, io
from server import PromptServer

from . import any_model, coders, inputs, model_patches, outputs, ranks, text_encoders  # noqa: F401, they fill NODES
from .node import NODES


class InjectExtension(ComfyExtension):
    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        return NODES


async def comfy_entrypoint() -> InjectExtension:
    if "PARALLEL_TEST_FORKED_RANKS" in os.environ:
        PromptServer.instance.add_on_prompt_handler(ranks.fork_ranks)
    return InjectExtension()
