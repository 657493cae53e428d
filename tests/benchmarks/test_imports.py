"""Every benchmark can still be imported: figures in docs/ name the benchmark that measures them again."""

import importlib.util
import sys
from pathlib import Path

from ranks import run_ranks

BENCHMARKS = sorted((Path(__file__).resolve().parents[2] / "benchmarks").glob("*.py"))


def import_each(world):
    """Returns what is missing. Modules get numbered names, because some files have the name of a library's module."""
    missing = []
    for number, path in enumerate(BENCHMARKS):
        spec = importlib.util.spec_from_file_location(f"benchmark_{number}", path)
        sys.modules[spec.name] = module = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except ImportError as error:
            missing.append(f"{path}: {error}")
    return missing


def test_every_benchmark_finds_what_it_imports():
    """Runs in a separate process, because benchmarks set threads and paths."""
    assert run_ranks(import_each, 1) == [[]]
    assert len(BENCHMARKS) > 20
