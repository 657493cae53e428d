"""The keys under which a MODEL's transformer_options carry what belongs to this pack."""

from __future__ import annotations

# The strategy chosen (StrategySettings), and the record of the run (RunRecord).
SETTINGS, RECORD = "parallel_strategy", "parallel_record"
# The options of computing it on the ranks (ComputeOptions).
COMPUTE_OPTIONS = "parallel_computing"
# The threshold of a step cache.
STEP_CACHE = "parallel_step_cache"
