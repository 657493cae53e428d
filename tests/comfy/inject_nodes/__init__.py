"""Test-only nodes: put made-up conditioning and latents into a graph, and take latents and text out of it.

They replace text encoder and VAE, which cannot be made tiny, so that a test compares samplers and nothing else.
"""

from __future__ import annotations

import os

from comfy_api.latest import ComfyExtension, io
from server import PromptServer

from .any_model import NODES as ANY_MODEL
from .inputs import (
    TestAnything,
    TestAttentionMask,
    TestConditioning,
    TestImage,
    TestLatent,
    TestNew,
    TestStyle,
)
from .loops import TestTwice
from .model_patches import NODES as MODEL_PATCHES
from .other_vaes import TestLtxVAE, TestSeed, TestShapeVAE
from .outputs import TestAppend, TestSaveImage, TestSaveLatent, TestSaveText
from .ranks import (
    TestNoFreeMemory,
    TestOtherPlatform,
    TestRankStates,
    TestUnload,
    TestUntilEarly,
    TestUntilHeld,
    fork_ranks,
)
from .text_and_image_coders import (
    TestCircularVAE,
    TestClip,
    TestImageVAE,
    TestOtherSwish,
    TestScaledVAE,
    TestTinyVAE,
    TestWanVAE,
)
from .text_encoders import NODES as TEXT_ENCODERS


class InjectExtension(ComfyExtension):
    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        return [
            *ANY_MODEL,
            *MODEL_PATCHES,
            *TEXT_ENCODERS,
            TestAnything,
            TestAppend,
            TestCircularVAE,
            TestClip,
            TestConditioning,
            TestLatent,
            TestNew,
            TestNoFreeMemory,
            TestOtherPlatform,
            TestSaveImage,
            TestSaveLatent,
            TestSaveText,
            TestOtherSwish,
            TestScaledVAE,
            TestStyle,
            TestTwice,
            TestLtxVAE,
            TestSeed,
            TestShapeVAE,
            TestTinyVAE,
            TestAttentionMask,
            TestRankStates,
            TestUnload,
            TestUntilEarly,
            TestUntilHeld,
            TestWanVAE,
            TestImageVAE,
            TestImage,
        ]


async def comfy_entrypoint() -> InjectExtension:
    if "PARALLEL_TEST_FORKED_RANKS" in os.environ:
        PromptServer.instance.add_on_prompt_handler(fork_ranks)
    return InjectExtension()
