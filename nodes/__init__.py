"""The nodes of the pack: thin classes that read inputs, call the backend once, and wrap the output."""

from __future__ import annotations

import comfy.model_management

from ..parallel_backend.devices import use_only_cpu
from ..parallel_backend.sidecar.cluster import head as clusters
from .compare import CompareWithOneDevice, ProveSampler
from .demo_loader import ParallelDemoLoader
from .loaders import ParallelFluxLoader, ParallelLoraLoader, ParallelModelLoader
from .parallel_model import ParallelCLIPNode, ParallelModelNode
from .sampler import ParallelSampler
from .step_cache import ParallelStepCache
from .strategy_selector import StrategySelector
from .vae_nodes import ParallelVAEDecode, ParallelVAEEncode

NODES = [
    StrategySelector,
    ParallelModelNode,
    ParallelModelLoader,
    ParallelFluxLoader,
    ParallelLoraLoader,
    ParallelSampler,
    ParallelStepCache,
    CompareWithOneDevice,
    ProveSampler,
    ParallelDemoLoader,
    ParallelCLIPNode,
    ParallelVAEDecode,
    ParallelVAEEncode,
]

if comfy.model_management.cpu_state == comfy.model_management.CPUState.CPU:
    use_only_cpu()
clusters.serve_known()
