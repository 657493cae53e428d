"""Sets up the environment and runs pytest in it (the body of scripts/test).

    ./scripts/test [PATH …] [pytest's options] [--comfyui FOLDER [--python PYTHON]]

`--comfyui`: the ComfyUI that the tests run, instead of the pinned one; its requirements are installed with the pack's.
`--python`: a Python that already has these requirements, pytest and the pack's requirements; then nothing is installed.
The first lines of the output name the version that ran.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import NoReturn

from comfyui_source import find_comfyui
from environment import ROOT, Environment, become, prepare
from steps import SetupError, exit_on_setup_error

# Tests start processes of their own (ranks, ComfyUI); more workers than this only make them wait for each other. They
# wait for those a third of the time, so two cores serve three workers.
_FEWEST_WORKERS, _MOST_WORKERS = 3, 4


def main() -> NoReturn:
    """Replaces this process by pytest and does not return."""
    given, arguments = _parse(sys.argv[1:])
    environment = _environment(given.comfyui, given.python)
    # Ranks and workers share the cores; torch's default of one thread per core each would stall all of them.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # Tests start hundreds of processes; without bytecode each would compile the pack and ComfyUI anew.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    parallel = ["-n", str(_workers()), "--dist", "loadgroup"]
    if any(argument.startswith(("-n", "--numprocesses", "--pdb")) for argument in arguments):
        parallel = []
    # A script's background jobs ignore SIGINT. ComfyUI would inherit that, but SIGINT is what stops it.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.chdir(ROOT)
    become(environment, "-m", "pytest", *parallel, *arguments)


def _parse(arguments: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Returns (our own options, pytest's arguments)."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--comfyui")
    parser.add_argument("--python")
    return parser.parse_known_args(arguments)


def _environment(comfyui: str | None, python: str | None) -> Environment:
    """Returns the environment for the tests. Raises SetupError if there is no such ComfyUI or Python."""
    if python is None:
        return prepare(comfyui)
    folder, found = find_comfyui(comfyui), shutil.which(python)
    if folder is None or found is None:
        missing = "ComfyUI: name its folder with --comfyui" if folder is None else f"Python {python}"
        raise SetupError(f"There is no {missing}.")
    return Environment(Path(found).absolute(), folder)


def _workers() -> int:
    return min(_MOST_WORKERS, max(_FEWEST_WORKERS, (os.cpu_count() or 2) // 2))


if __name__ == "__main__":
    exit_on_setup_error(main)
