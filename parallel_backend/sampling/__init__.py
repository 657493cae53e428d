"""Samplers as pure functions over a model that hides all parallelism, whole or patch by patch."""
