"""Hostile and odd inputs, drawn from fixed seeds, and counts of the failures they cause (benchmarks/adversary.py)."""

import subject  # noqa: F401  puts the tests' support on the path
