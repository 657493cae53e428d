"""Tiny models of ComfyUI's own classes with random weights (CASES), which prove the entries of the table."""
