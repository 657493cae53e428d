"""Ranks that torchrun started on another machine."""
