"""Parallel forward of a model under a strategy: rank groups, and the engines `native` and `xfuser` behind one seam."""
