"""The cases of benchmarks/faults.py, grouped by what fails: ranks, jobs, or their surroundings."""

import subject  # noqa: F401  # puts the tests' support modules on the path, which the cases import

from . import crashes, jobs, surroundings
from .case import CASES, Subject, true

__all__ = ["CASES", "Subject", "crashes", "jobs", "surroundings", "true"]
