"""The denoise loop of a plain job: samplers as pure functions over a model that hides all parallelism."""
