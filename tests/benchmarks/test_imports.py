"""Every benchmark can still be imported: figures in docs/ name the benchmark that measures them again."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = sorted((ROOT / "benchmarks").glob("*.py"))
# Runs in a separate process, because benchmarks set threads and paths. The modules get numbered names, because some
# files have the name of a library's module.
IMPORT_EACH = """
import importlib.util, sys
import diffusers, torch.distributed
sys.path += sys.argv[1].split(":")
for number, path in enumerate(sys.argv[2:]):
    spec = importlib.util.spec_from_file_location(f"benchmark_{number}", path)
    sys.modules[spec.name] = module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except ImportError as error:
        print(f"{path}: {error}")
"""


def test_every_benchmark_finds_what_it_imports():
    folders = ":".join(str(ROOT / name) for name in (".", "tests/support", "scripts", "benchmarks"))
    command = [sys.executable, "-c", IMPORT_EACH, folders, *map(str, BENCHMARKS)]
    found = subprocess.run(command, capture_output=True, text=True, timeout=240, check=True)
    assert found.stdout == ""
    assert len(BENCHMARKS) > 20
