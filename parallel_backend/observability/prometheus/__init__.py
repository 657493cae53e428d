"""Counts for Prometheus, and their switch."""
