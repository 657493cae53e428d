"""Set up the environment and run pytest in it (the body of scripts/test)."""

from __future__ import annotations

import os
import sys
from typing import NoReturn

from environment import ROOT, become, prepare
from steps import exit_on_setup_error

# Tests start processes of their own (ranks, ComfyUI); more workers than this only make them wait for each other.
_MOST_WORKERS = 4


def main() -> NoReturn:
    """Becomes pytest; returns only by an error."""
    environment = prepare()
    # Ranks and workers share the cores; torch's default of one thread per core each would stall all of them.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # Tests start hundreds of processes; without bytecode each would compile the pack and ComfyUI anew.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    arguments = sys.argv[1:]
    parallel = ["-n", str(_workers()), "--dist", "loadgroup"]
    if any(argument.startswith(("-n", "--numprocesses", "--pdb")) for argument in arguments):
        parallel = []
    os.chdir(ROOT)
    become(environment, "-m", "pytest", *parallel, *arguments)


def _workers() -> int:
    return min(_MOST_WORKERS, max(2, (os.cpu_count() or 2) // 2))


if __name__ == "__main__":
    exit_on_setup_error(main)
