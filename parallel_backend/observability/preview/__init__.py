"""A preview of settings, told before a run."""
