"""Metrics for Prometheus, and their switch."""
