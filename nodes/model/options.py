"""The keys under which a MODEL's transformer_options carry what belongs to this pack."""

from __future__ import annotations

from collections.abc import Mapping

from ...parallel_backend.wire.weight_patches import NO_PATCHES, WeightPatches

# The strategy chosen (StrategySettings), and the record of the run (RunRecord).
SETTINGS, RECORD = "parallel_strategy", "parallel_record"
# Its LoRAs (WeightPatches), which go along with every model call, and how the ranks compute it (ComputeOptions).
PATCHES, COMPUTE_OPTIONS = "parallel_weight_patches", "parallel_computing"
# The same with those that hooks of the call's prompts bring, in the options of that call alone.
HOOKED_PATCHES = "parallel_hooked_weight_patches"
# ComfyUI's own: what a sampler of causal models keeps of the frames before, and how its node begins.
FRAME_CACHES = "ar_state"
# The way in which reference images have their places and timestep, where a node has replaced the model's own.
REFERENCES_METHOD = "parallel_references_method"
# The threshold of a step cache for samplers that are not the pack's.
STEP_CACHE = "parallel_step_cache"
OWN_OPTIONS = frozenset(
    {SETTINGS, RECORD, PATCHES, HOOKED_PATCHES, COMPUTE_OPTIONS, REFERENCES_METHOD, STEP_CACHE}
)


def patches_of(options: Mapping[str, object]) -> WeightPatches:
    """The changes of weights that a call with these transformer_options is computed with."""
    return options.get(HOOKED_PATCHES) or options.get(PATCHES) or NO_PATCHES
