"""Options of computing on ranks: compiled blocks, the kernel of attention, the step cache (docs/step-cache.md)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from .errors import RequestError, StrategyError
from .strategy import ParallelStrategy

AUTO = "auto"
COMPILE_MODES = (AUTO, "off", "blocks")  # auto: settled by planner/compile_choice.py before ranks see it
# `torch` is scaled_dot_product_attention; the others are those of the packages that people install.
ATTENTION_KERNELS = ("auto", "torch", "cudnn", "flash", "flash_3", "sage")
# A variable with a backend of torch.compile in place of inductor: `aot_eager` and `eager` need no C++ compiler and show
# whether a fault is inductor's. For tests, and for finding faults.
COMPILE_BACKEND = "PARALLEL_SAMPLING_COMPILE_BACKEND"
# What a rank on the CPU may use of its cores while the others wait: what it would have had without them.
THREADS_ALONE = "PARALLEL_SAMPLING_THREADS_ALONE"
# CUDA's own: kernels of streams that share a queue wait for each other. Each communicator of NCCL's has a stream, and a
# stage of PipeFusion sends on one what another rank wants before it answers on the other. 8 are CUDA's default.
DEVICE_QUEUES = {"CUDA_DEVICE_MAX_CONNECTIONS": "32"}
APPROXIMATE_KERNELS = ("sage",)  # it quantises queries, keys and values
# What devices send each other for attention: as it is computed, or rounded to 8 bits (docs/rounded-exchange.md).
SAME, ROUNDED = "same", "fp8"
EXCHANGE_DTYPES = (SAME, ROUNDED)


@dataclass(frozen=True)
class ComputeOptions:
    """`compile`: one of COMPILE_MODES; `attention`: one of ATTENTION_KERNELS; `exchange_dtype`: one of
    EXCHANGE_DTYPES."""

    compile: str = "off"
    attention: str = "auto"
    exchange_dtype: str = SAME

    def __post_init__(self) -> None:
        for name, value, known in (
            ("compile", self.compile, COMPILE_MODES),
            ("attention", self.attention, ATTENTION_KERNELS),
            ("exchange_dtype", self.exchange_dtype, EXCHANGE_DTYPES),
        ):
            if value not in known:
                raise RequestError(f"{name} {value!r} is unknown; choose one of {', '.join(known)}.")

    @property
    def compiles(self) -> bool:
        return self.compile == "blocks"

    @property
    def approximate_inputs(self) -> tuple[str, ...]:
        """Returns what to do, input by input, so that nothing here makes a result approximate."""
        kernel = ("set attention to auto",) if self.attention in APPROXIMATE_KERNELS else ()
        exchange = ("set exchange_dtype to same",) if self.exchange_dtype != SAME else ()
        return kernel + exchange


DEFAULT_COMPUTE = ComputeOptions()


@dataclass(frozen=True)
class CompileStats:
    """The work of compiling in a request, of one rank or of the one that did most: `graphs` new ones in `seconds`;
    `uncompiled`: calls of blocks that ran as they are all the same."""

    graphs: int
    seconds: float
    uncompiled: int


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
            "blocks. Set step_cache to off (or take Parallel Step Cache out), or pipefusion_degree to 1: CFG, data, "
            "Ulysses, Ring, tensor_degree and shard_weights go with it.",
            inputs=("pipefusion_degree",),
        )
