"""A test-only pack that changes models, guiders and samplers in the ways of popular packs."""

from __future__ import annotations

from .cache import TestStepCache
from .models import TestAttentionKernel, TestBlockClosure, TestCountedPatching, TestEmbeddings
from .sampling import TestDirectCalls, TestPackGuider, TestPackSampler

NODES = (
    TestAttentionKernel,
    TestBlockClosure,
    TestCountedPatching,
    TestDirectCalls,
    TestEmbeddings,
    TestPackGuider,
    TestPackSampler,
    TestStepCache,
)
NODE_CLASS_MAPPINGS = {node.__name__: node for node in NODES}
