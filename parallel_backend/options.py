"""Compute options of the ranks: compiled blocks, the attention kernel, the step cache (docs/step-cache.md)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from .errors import RequestError, StrategyError
from .strategy import ParallelStrategy

AUTO = "auto"
COMPILE_MODES = (AUTO, "off", "blocks")  # planner/compile_choice.py resolves `auto` before ranks see it
# `torch` is scaled_dot_product_attention; the names after it are kernels of packages that people install.
ATTENTION_KERNELS = ("auto", "torch", "cudnn", "flash", "flash_3", "sage")
# Environment variable: a torch.compile backend to use instead of inductor. `aot_eager` and `eager` need no C++ compiler
# and show if a fault is inductor's. For tests and debugging.
COMPILE_BACKEND = "PARALLEL_SAMPLING_COMPILE_BACKEND"
# Environment variable: CPU threads of a rank while the others wait, as many as it would have without them.
THREADS_ALONE = "PARALLEL_SAMPLING_THREADS_ALONE"
# Environment variable of tests and benchmarks: a module that causes faults in ranks, a space, and its `arm`'s first
# argument.
FAULT = "PARALLEL_SAMPLING_FAULT"
# An environment variable of CUDA: kernels of streams that share a hardware queue wait for each other. Each NCCL
# communicator has a stream, and a PipeFusion stage sends on one stream what another rank needs before it answers on
# another stream. CUDA's default is 8.
DEVICE_QUEUES = {"CUDA_DEVICE_MAX_CONNECTIONS": "32"}
APPROXIMATE_KERNELS = ("sage",)  # it quantises queries, keys and values
# The dtype that devices send each other for attention: unchanged, or rounded to 8 bits (docs/rounded-exchange.md).
SAME, ROUNDED = "same", "fp8"
EXCHANGE_DTYPES = (SAME, ROUNDED)


@dataclass(frozen=True)
class ComputeOptions:
    """Compute options. `compile`: one of COMPILE_MODES; `attention`: one of ATTENTION_KERNELS; `exchange_dtype`: one
    of EXCHANGE_DTYPES."""

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
        """Advice for each input that makes results approximate, such as "set attention to auto"."""
        kernel = ("set attention to auto",) if self.attention in APPROXIMATE_KERNELS else ()
        exchange = ("set exchange_dtype to same",) if self.exchange_dtype != SAME else ()
        return kernel + exchange


DEFAULT_COMPUTE = ComputeOptions()


@dataclass(frozen=True)
class CompileStats:
    """The compile work of one request, on one rank or on the rank that did most. `graphs`: new graphs, compiled in
    `seconds`; `uncompiled`: block calls that ran uncompiled although compiling was on."""

    graphs: int
    seconds: float
    uncompiled: int


STEP_CACHES = ("off", "first_block")
# The value that First Block Cache's users in ComfyUI know for Flux dev at 28 steps (Comfy-WaveSpeed's README);
# diffusers' page on ParaAttention uses 0.08.
DEFAULT_THRESHOLD = 0.12


def check_threshold(threshold: float) -> None:
    """Raises RequestError unless `threshold` is finite and at least 0."""
    if not (math.isfinite(threshold) and threshold >= 0):
        raise RequestError(
            f"cache_threshold is {threshold}; it must be 0 (no reuse) or above, 0.05 to 0.2 as a rule."
        )


def check_step_cache(threshold: float, strategy: ParallelStrategy) -> None:
    """Raises RequestError for a threshold that check_threshold refuses, and StrategyError if the step cache is on with
    PipeFusion, which never has all ranks at the same step."""
    check_threshold(threshold)
    if threshold > 0 and strategy.pipefusion_degree > 1:
        raise StrategyError(
            f"step_cache does not go with pipefusion_degree {strategy.pipefusion_degree}: patches of several steps are "
            "on their way through the devices at once, so there is no moment at which all could leave out a step's "
            "blocks. Set step_cache to off (or take Parallel Step Cache out), or pipefusion_degree to 1: CFG, data, "
            "Ulysses, Ring, tensor_degree and shard_weights go with it.",
            inputs=("pipefusion_degree",),
        )
