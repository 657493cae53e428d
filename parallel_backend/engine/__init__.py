"""Parallel forward of a model under a strategy: rank groups, and one interface to the engines `native` and `xfuser`."""
