"""Hostile and odd inputs in numbers, drawn from fixed seeds (benchmarks/adversary.py)."""

import subject  # noqa: F401  puts the tests' support on the path
