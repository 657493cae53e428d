"""Formats in which files store weights: GGUF, quantised layers, other layouts of keys."""
