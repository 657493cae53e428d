"""Samplers as pure functions over a model that hides all parallelism; whole latents or patch by patch."""
