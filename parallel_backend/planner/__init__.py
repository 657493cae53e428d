"""Decides which strategy runs: rules, memory, measurements, trials."""
