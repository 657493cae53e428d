"""Predicted memory of each rank, and what fits."""
