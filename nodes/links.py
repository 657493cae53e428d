"""The pack's own link types, and inputs and outputs that several nodes have. Links never carry running ranks."""

from __future__ import annotations

from comfy_api.latest import io

from ..parallel_backend.options import AUTO, COMPILE_MODES, DEFAULT_THRESHOLD, EXCHANGE_DTYPES, SAME

CATEGORY = "parallel"

StrategyLink = io.Custom("PARALLEL_STRATEGY")  # carries rules.StrategySettings
ModelLink = io.Custom("PARALLEL_MODEL")  # carries job.model.JobPatcher, as MODEL does


# What the strategy does at a node that names a model, at one that uses ranks without a model, and at a sampler.
OF_A_MODEL = (
    "From Strategy Selector. Without it: the devices of the setting Default devices (all if it is not set), split "
    "automatically."
)
OF_RANKS = (
    "From Strategy Selector: the devices. If the processes of some hold a model or sleep, only those are used. Without "
    "it: those of the setting Default devices (all if it is not set)."
)
OF_A_SAMPLER = "From Strategy Selector; replaces the loader's."


def strategy_input(tooltip: str = OF_A_MODEL) -> io.Custom.Input:
    return StrategyLink.Input("strategy", optional=True, tooltip=tooltip)


def threshold_input(*, optional: bool = False) -> io.Float.Input:
    """Returns the threshold input of nodes that have a step cache."""
    return io.Float.Input(
        "cache_threshold",
        default=DEFAULT_THRESHOLD,
        min=0.0,
        max=1.0,
        step=0.01,
        round=0.001,
        optional=optional,
        tooltip="By how much, relatively, the first block may have changed for a step to skip the others. "
        "Lower stays closer to the exact image, 0 is exact; 0.08 to 0.12 is usual for Flux dev.",
    )


def compile_input() -> io.Combo.Input:
    """Returns the input for ComputeOptions.compile of nodes that name a model."""
    return io.Combo.Input(
        "compile",
        options=list(COMPILE_MODES),
        default=AUTO,
        optional=True,
        tooltip="blocks: torch.compile for the transformer's blocks. Steps get faster, but the first step of a new "
        "image size can take longer. Needs a C compiler. auto does it where it pays, never on a CPU.",
    )


def exchange_input() -> io.Combo.Input:
    """Returns the input for ComputeOptions.exchange_dtype of nodes that name a model."""
    return io.Combo.Input(
        "exchange_dtype",
        options=list(EXCHANGE_DTYPES),
        default=SAME,
        optional=True,
        advanced=True,
        tooltip="What devices send each other for attention under Ulysses and Ring. fp8 rounds it to 8 bits: half the "
        "bytes, for devices that are linked slowly, and approximate. same is exact.",
    )


def model_output() -> io.Model.Output:
    return io.Model.Output("model", tooltip="An ordinary MODEL for KSampler and all other stock nodes.")


def parallel_model_output() -> io.Custom.Output:
    return ModelLink.Output(
        "parallel_model", tooltip="For Parallel Sampler, or first for Parallel LoRA Loader."
    )
