"""Attention over the sequence axis: kernels, the engines `native` and `xfuser`, and stale keys for PipeFusion."""
