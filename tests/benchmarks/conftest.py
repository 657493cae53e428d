"""Benchmarks' modules are imported by the names that their commands have for them."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))
