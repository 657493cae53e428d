"""Reads facts about this machine without starting ranks: versions, limits, folders, processes."""

from __future__ import annotations

import os
import platform
import shutil
from importlib.util import find_spec
from pathlib import Path

from ...errors import CheckpointError
from ...machine.fingerprint import cores, installed_version
from ...machine.self_tests import SelfTestStore
from ...models.comfyui.model_file import inspect
from ...models.proof.installed import digests_in, find_folder, version_in
from ...models.proof.states import is_proven
from .devices import KERNELS
from .system import VARIABLES, System
from .versions import BOUNDS

_MODELS = ("diffusion_models", "unet", "checkpoints")  # folders
_ENDINGS = (".safetensors", ".gguf")
MAX_FILES = 100  # whose headers are read
MAX_MODELS = 2  # that are reported
_RANK = b"parallel_backend.rank"


def probe_versions() -> dict[str, str]:
    """Returns versions by package name, "" for a package that is not installed. Imports none of them."""
    names = (*(bound.package for bound in BOUNDS), "triton", "nvidia-ml-py")
    return {n: platform.python_version() if n == "python" else installed_version(n) for n in names}


def probe_classes() -> tuple[str, list[str]] | None:
    """Returns (version of ComfyUI, model classes whose code has not been tested), or None if no ComfyUI is found."""
    root = find_folder()
    if root is None:
        return None
    store = SelfTestStore()
    unproven = {name: digest for name, digest in digests_in(root).items() if not is_proven(name, digest)}
    return version_in(root), [name for name, digest in unproven.items() if store.find(name, digest) is None]


def probe_models() -> list[tuple[int, int]]:
    """Returns the distinct (blocks, width) of the largest transformers in ComfyUI's model folders, read from file
    headers; empty if no ComfyUI is found. Folders that are added in ComfyUI's settings are not searched."""
    root = find_folder()
    if root is None:
        return []
    files = [
        path for name in _MODELS for path in (root / "models" / name).rglob("*") if path.suffix in _ENDINGS
    ]
    found: dict[tuple[int, int], None] = {}
    for path in sorted(files, key=_size, reverse=True)[:MAX_FILES]:
        try:
            file = inspect(path)
        except (CheckpointError, OSError):
            continue
        blocks = file.weights.blocks
        if file.is_transformer and blocks and file.width:
            found[sum(kind.count for kind in blocks), file.width] = None
        if len(found) == MAX_MODELS:
            break
    return list(found)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:  # a link to nowhere
        return 0


def probe_torch() -> str:
    """Returns why torch cannot be imported, or empty. E.g. a CUDA build without its libraries fails to import."""
    try:
        import torch  # noqa: F401
    except (ImportError, OSError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def probe_kernels() -> set[str]:
    """Returns those packages of attention kernels that can be imported."""
    return {package for package in KERNELS.values() if find_spec(package) is not None}


def probe_system(shm: Path = Path("/dev/shm")) -> System:
    import resource  # missing on Windows, where this module must still be importable

    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    usage = shutil.disk_usage(shm) if shm.is_dir() else None
    return System(
        cores=cores(),
        shm=None if usage is None else usage.total,
        shm_free=0 if usage is None else usage.free,
        open_files=-1 if files == resource.RLIM_INFINITY else files,
        locked_memory=-1 if locked == resource.RLIM_INFINITY else locked,
        variables={name: os.environ[name] for name, *_ in VARIABLES if name in os.environ},
    )


def probe_leftovers(proc: Path = Path("/proc")) -> list[int]:
    """Returns the process ids of ranks of this user whose parent has ended."""
    return sorted(int(entry.name) for entry in proc.iterdir() if entry.name.isdigit() and _is_orphan(entry))


def _is_orphan(entry: Path) -> bool:
    """Returns True if the process is a rank of this user whose parent is no longer the process that started it."""
    try:
        words = (entry / "cmdline").read_bytes().split(b"\0")
        if _RANK not in words or b"--parent" not in words or entry.stat().st_uid != os.getuid():
            return False
        started_by = int(words[words.index(b"--parent") + 1])
        parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, ValueError, IndexError):  # it has just ended, or is no rank after all
        return False
    return parent != started_by
