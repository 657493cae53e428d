"""The model files in ComfyUI's folders that the devices can read, and their paths."""

from __future__ import annotations

from pathlib import Path

import folder_paths

from ...parallel_backend.errors import CheckpointError
from ...parallel_backend.models.gguf_file import SUFFIX, is_gguf

_SUFFIXES = (".safetensors", ".sft")
# ComfyUI lists no GGUF files, so the pack registers a model folder for them. It shares the list object of paths, and so
# includes paths that are added later.
GGUF_FOLDER = "parallel_gguf"
folder_paths.folder_names_and_paths[GGUF_FOLDER] = (
    folder_paths.folder_names_and_paths["diffusion_models"][0],
    {SUFFIX},
)
DEMO_MODEL = Path(__file__).resolve().parents[2] / "demo_model" / "transformer.safetensors"
# The part that ComfyUI loads from the files of each model folder (ComfyUISource.part).
PARTS = {
    "diffusion_models": "diffusion_model",
    "checkpoints": "checkpoint",
    GGUF_FOLDER: "diffusion_model",
}


def is_safetensors(name: str) -> bool:
    """Returns True if the name ends in .safetensors or .sft, in upper or lower case, as in ComfyUI's lists."""
    return Path(name).suffix.lower() in _SUFFIXES


def model_names(*folders: str) -> list[str]:
    """Lists the names of the model files that the devices can read, without duplicates."""
    names = (name for folder in folders for name in folder_paths.get_filename_list(folder))
    return list(dict.fromkeys(name for name in names if is_safetensors(name) or is_gguf(name)))


def model_path(folder: str, name: str) -> str:
    """Returns the path of the file. Raises CheckpointError if there is no such file (any more)."""
    path = folder_paths.get_full_path(folder, name)
    if path is None:
        raise CheckpointError(
            f"There is no file behind {name}: it was moved or removed, or it is a link to one that is not there. Put "
            f"the file back, or choose another one."
        )
    return str(path)
