"""Where GGUF files are looked for: ComfyUI lists none of them, so the pack has a folder of models for them."""

from __future__ import annotations

import folder_paths

from ...parallel_backend.models.gguf_file import SUFFIX

GGUF_FOLDER = "parallel_gguf"
# The same list of paths, so that it also has those that ComfyUI learns of later.
folder_paths.folder_names_and_paths[GGUF_FOLDER] = (
    folder_paths.folder_names_and_paths["diffusion_models"][0],
    {SUFFIX},
)
