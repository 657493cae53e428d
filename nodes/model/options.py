"""The keys under which a MODEL's transformer_options carry what belongs to this pack."""

from __future__ import annotations

# The strategy chosen (StrategySettings), and the record of the run (RunRecord).
SETTINGS, RECORD = "parallel_strategy", "parallel_record"
# Its LoRAs (WeightPatches), which go along with every model call, and how the ranks compute it (ComputeOptions).
PATCHES, COMPUTE_OPTIONS = "parallel_weight_patches", "parallel_computing"
OWN_OPTIONS = frozenset({SETTINGS, RECORD, PATCHES, COMPUTE_OPTIONS})
