"""Loads a model on the devices ahead of the first prompt that needs it."""
