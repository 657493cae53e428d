"""The keys under which a MODEL's transformer_options carry what belongs to this pack."""

from __future__ import annotations

# The strategy chosen (StrategySettings), and the record of the run (RunRecord).
SETTINGS, RECORD = "parallel_strategy", "parallel_record"
# Its LoRAs (WeightPatches), which go along with every model call, and how the ranks compute it (ComputeOptions).
PATCHES, COMPUTE_OPTIONS = "parallel_weight_patches", "parallel_computing"
# ComfyUI's own: what a sampler of causal models keeps of the frames before, and how its node begins.
FRAME_CACHES = "ar_state"
# The way in which reference images have their places and timestep, where a node has replaced the model's own.
REFERENCES_METHOD = "parallel_references_method"
# The threshold of a step cache for samplers that are not the pack's.
STEP_CACHE = "parallel_step_cache"
OWN_OPTIONS = frozenset({SETTINGS, RECORD, PATCHES, COMPUTE_OPTIONS, REFERENCES_METHOD, STEP_CACHE})
