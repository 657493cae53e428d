"""The denoise loop of a resident request: samplers as pure functions over a model that hides all parallelism."""
