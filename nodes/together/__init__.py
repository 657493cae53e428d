"""Waiting prompts that differ by their seed alone, computed at once: one image per GPU."""
