"""The step cache as a person sets it: what it is called, its threshold, what it does not go with.

engine/step_cache.py does it. docs/step-cache.md says what it saves and what it costs.
"""

from __future__ import annotations

import math

from .errors import RequestError, StrategyError
from .strategy import ParallelStrategy

STEP_CACHES = ("off", "first_block")
# What users of First Block Cache in ComfyUI know for Flux dev at 28 steps (Comfy-WaveSpeed's README); diffusers' page
# on ParaAttention has 0.08.
DEFAULT_THRESHOLD = 0.12


def check_threshold(threshold: float) -> None:
    """Raises RequestError for what no difference can be compared with."""
    if not (math.isfinite(threshold) and threshold >= 0):
        raise RequestError(
            f"cache_threshold is {threshold}; it must be 0 (no reuse) or above, 0.05 to 0.2 as a rule."
        )


def check_step_cache(threshold: float, strategy: ParallelStrategy) -> None:
    """Raises StrategyError where the step cache is on and `strategy` has no moment at which it could decide."""
    if threshold > 0 and strategy.pipefusion_degree > 1:
        raise StrategyError(
            f"step_cache does not go with pipefusion_degree {strategy.pipefusion_degree}: patches of several steps are "
            "on their way through the devices at once, so there is no moment at which all could leave out a step's "
            "blocks. Set step_cache to off, or pipefusion_degree to 1: CFG, data, Ulysses, Ring, tensor_degree and "
            "shard_weights go with it.",
            inputs=("pipefusion_degree",),
        )
