"""Attention over the sequence axis: the kernels on one rank, and the engines `native` and `xfuser`."""
