"""The model files that ComfyUI's folders offer: those that the devices read, and where they are."""

from __future__ import annotations

from pathlib import Path

import folder_paths

from ...parallel_backend.errors import CheckpointError

_SUFFIXES = (".safetensors", ".sft")


def is_safetensors(name: str) -> bool:
    """By its name, in whichever case, as ComfyUI lists it."""
    return Path(name).suffix.lower() in _SUFFIXES


def model_names(*folders: str) -> list[str]:
    """Of the files that devices read, each once."""
    names = (name for folder in folders for name in folder_paths.get_filename_list(folder))
    return list(dict.fromkeys(filter(is_safetensors, names)))


def model_path(folder: str, name: str) -> str:
    """Raises CheckpointError for a name behind which there is no file (any more)."""
    path = folder_paths.get_full_path(folder, name)
    if path is None:
        raise CheckpointError(
            f"There is no file behind {name}: it was moved or removed, or it is a link to one that is not there. Put "
            f"the file back, or choose another one."
        )
    return str(path)
