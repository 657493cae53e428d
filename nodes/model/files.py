"""The model files that ComfyUI's folders offer: those that the devices read, and where they are."""

from __future__ import annotations

from pathlib import Path

import folder_paths

from ...parallel_backend.errors import CheckpointError
from ...parallel_backend.models.gguf_file import SUFFIX, is_gguf

_SUFFIXES = (".safetensors", ".sft")
# ComfyUI lists no GGUF files, so the pack has a folder of models for them: on the same list of paths, which then also
# has those that ComfyUI learns of later.
GGUF_FOLDER = "parallel_gguf"
folder_paths.folder_names_and_paths[GGUF_FOLDER] = (
    folder_paths.folder_names_and_paths["diffusion_models"][0],
    {SUFFIX},
)
# Folders of models by what ComfyUI loads from them (ComfyUISource.part).
PARTS = {
    "diffusion_models": "diffusion_model",
    "checkpoints": "checkpoint",
    GGUF_FOLDER: "diffusion_model",
}


def is_safetensors(name: str) -> bool:
    """By its name, in whichever case, as ComfyUI lists it."""
    return Path(name).suffix.lower() in _SUFFIXES


def model_names(*folders: str) -> list[str]:
    """Of the files that devices read, each once."""
    names = (name for folder in folders for name in folder_paths.get_filename_list(folder))
    return list(dict.fromkeys(name for name in names if is_safetensors(name) or is_gguf(name)))


def model_path(folder: str, name: str) -> str:
    """Raises CheckpointError for a name behind which there is no file (any more)."""
    path = folder_paths.get_full_path(folder, name)
    if path is None:
        raise CheckpointError(
            f"There is no file behind {name}: it was moved or removed, or it is a link to one that is not there. Put "
            f"the file back, or choose another one."
        )
    return str(path)
