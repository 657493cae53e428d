"""What a person drags: thin node classes that read inputs, call the backend once, and wrap the output."""

from __future__ import annotations

from .demo_loader import ParallelDemoLoader
from .flux_loader import ParallelFluxLoader
from .parallel_lora_loader import ParallelLoraLoader
from .parallel_vae_decode import ParallelVAEDecode
from .sampler import ParallelSampler
from .strategy_selector import StrategySelector

NODES = [
    StrategySelector,
    ParallelFluxLoader,
    ParallelLoraLoader,
    ParallelSampler,
    ParallelDemoLoader,
    ParallelVAEDecode,
]
