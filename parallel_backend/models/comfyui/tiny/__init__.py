"""Tiny models of ComfyUI's own classes with random weights, on which an entry of the table is proven (CASES)."""
