"""Puts benchmarks/ on the import path: tests import its modules by the same names as the benchmark commands."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))
