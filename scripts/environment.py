"""Makes the checkout's .venv: pinned requirements, test tools and a real ComfyUI with its requirements.

Standard library only. A second run compares one stamp, a hash over everything that decides what is installed, and
returns at once when it is unchanged.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import tomllib
import urllib.request
import venv
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import comfyui_source
import torchvision_on_cpu
from steps import SetupError, exit_on_setup_error, run_logged, step

ROOT = Path(__file__).resolve().parent.parent
ENVIRONMENT = ROOT / ".venv"

# ComfyUI's list names these without versions; ours are pinned, and must not be replaced by a second resolution.
_HELD_BACK = {"torch", "torchvision", "torchaudio"}
# torch's builds without CUDA (about 200 MB instead of several GB), for machines without an NVIDIA driver.
_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
_CPU_INDEX_TIMEOUT = 5  # seconds


@dataclass(frozen=True)
class Environment:
    """An installed environment: its Python, and the ComfyUI that its packages serve."""

    python: Path
    comfyui: Path


def prepare(comfyui: str | Path | None = None) -> Environment:
    """Makes or updates ``.venv`` and returns it with a real ComfyUI; quick if nothing has changed.

    Raises:
        SetupError: a step failed; the message says which and what to do.
    """
    ENVIRONMENT.mkdir(exist_ok=True)
    with (ENVIRONMENT / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two runs in one checkout would spoil each other's installation
        return _prepare(comfyui)


def _prepare(comfyui: str | Path | None) -> Environment:
    python = ENVIRONMENT / "bin" / "python"
    stamp = ENVIRONMENT / ".requirements-stamp"
    log = ENVIRONMENT / "setup.log"
    folder = comfyui_source.find_comfyui(comfyui)
    if folder and stamp.is_file() and stamp.read_text() == _stamp(folder) and _works(python):
        return Environment(python=python, comfyui=folder)

    log.write_text("")
    print(f"Setting up {ENVIRONMENT} (once; log: {log})", flush=True)
    if not _works(python):
        with step(f"Making a virtual environment with Python {platform.python_version()}"):
            _make_virtual_environment()
    with step("Updating pip"):
        _pip(python, log, "--upgrade", "pip", "setuptools", "wheel")
    if folder is None:
        folder = comfyui_source.get_comfyui(python, log)
    print(f"-- ComfyUI {comfyui_source.comfyui_version(folder)} in {folder}", flush=True)
    with step("Installing torch and the pack's requirements"):
        pinned = ["--constraint", ROOT / "constraints.txt", *_cpu_index()]
        _pip(python, log, *pinned, "--requirement", ROOT / "requirements.txt")
        # Without their dependencies: each release of these two asks for exactly one torch.
        _pip(python, log, *pinned, "--no-deps", "torchvision", "torchaudio")
    with step("Installing ComfyUI's requirements and the test tools"):
        wanted = [*_comfyui_requirements(folder), *_test_requirements()]
        _pip(python, log, "--constraint", ROOT / "constraints.txt", *wanted)
    torchvision_on_cpu.repair_if_needed(python)
    stamp.write_text(_stamp(folder))
    return Environment(python=python, comfyui=folder)


def become(environment: Environment, *command: str | Path) -> NoReturn:
    """Replaces this process by the environment's Python running ``command``, with COMFYUI_PATH set.

    It starts no child process, so that signals reach the one process that has something to clean up.
    """
    variables = {**os.environ, "COMFYUI_PATH": str(environment.comfyui), "VIRTUAL_ENV": str(ENVIRONMENT)}
    variables["PATH"] = f"{environment.python.parent}{os.pathsep}{os.environ.get('PATH', '')}"
    sys.stdout.flush()
    os.execve(environment.python, [str(environment.python), *map(str, command)], variables)


def _make_virtual_environment() -> None:
    if platform.system() != "Linux":
        print(
            "   note: several GPUs need Linux (on Windows: WSL2); elsewhere only the CPU processes can be tried."
        )
    try:
        venv.create(ENVIRONMENT, with_pip=True, upgrade_deps=False)
    except (subprocess.CalledProcessError, OSError) as error:
        raise SetupError(
            f"Python {platform.python_version()} ({sys.executable}) cannot make a virtual environment: {error}\n"
            "On Debian and Ubuntu: sudo apt install python3-venv"
        ) from error


def _works(python: Path) -> bool:
    """Returns True if there is an environment with pip. Raises SetupError if its Python is too old; deletes nothing."""
    if not python.exists():
        return False
    answer = subprocess.run(
        [python, "-c", "import pip, sys; print(sys.version_info >= (3, 11))"], capture_output=True, text=True
    )
    if answer.stdout.strip() == "False":
        raise SetupError(f"{ENVIRONMENT} is a Python older than 3.11. Remove that folder and run this again.")
    return answer.returncode == 0


def _pip(python: Path, log: Path, *arguments: str | Path) -> None:
    run_logged(
        [python, "-m", "pip", "install", "--disable-pip-version-check", *arguments],
        log=log,
        remedy="Check the network, free disk space, and that a wheel exists for this Python "
        f"({platform.python_version()}); tested: 3.11.",
    )


def _cpu_index() -> list[str]:
    """Returns pip's options for CPU builds of torch, or [] with an NVIDIA driver or an index that cannot be reached."""
    if shutil.which("nvidia-smi") or Path("/proc/driver/nvidia").exists():
        return []
    try:
        with urllib.request.urlopen(f"{_CPU_INDEX}/torch/", timeout=_CPU_INDEX_TIMEOUT):
            return ["--extra-index-url", _CPU_INDEX]
    except OSError:
        return []


def _comfyui_requirements(folder: Path) -> list[str]:
    lines = (line.split("#")[0].strip() for line in (folder / "requirements.txt").read_text().splitlines())
    return [
        line for line in lines if line and re.split(r"[^A-Za-z0-9_.-]", line)[0].lower() not in _HELD_BACK
    ]


def _test_requirements() -> list[str]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]["test"]


def _stamp(folder: Path) -> str:
    """Returns a hash over everything that decides what is installed."""
    parts = [
        (ROOT / "requirements.txt").read_text(),
        (ROOT / "constraints.txt").read_text(),
        "\n".join(_test_requirements()),
        "\n".join(_comfyui_requirements(folder)),
        Path(torchvision_on_cpu.__file__).read_text(),
        platform.python_version(),
    ]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


if __name__ == "__main__":
    exit_on_setup_error(lambda: print(f"Ready: {prepare().python}"))
