"""How files keep weights: GGUF, quantised layers, other layouts of keys."""
