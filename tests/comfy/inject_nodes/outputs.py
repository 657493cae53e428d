"""Nodes that write latents, images and texts of a graph to files."""

from __future__ import annotations

import time
from pathlib import Path

import comfy.model_management
import folder_paths
from comfy_api.latest import io
from safetensors.torch import save_file

from .node import node


def output_path(path: str) -> Path:
    """Returns ``path`` under ComfyUI's output folder, after creating its parent folders."""
    target = Path(folder_paths.get_output_directory()) / path
    target.parent.mkdir(parents=True, exist_ok=True)
    return target


@node("TestSaveLatent", is_output_node=True)
def save_latent(latent: io.Latent, path: str):
    """Writes a LATENT's samples as safetensors (key ``samples``) to a path under the output folder."""
    save_file({"samples": latent["samples"].contiguous().cpu()}, output_path(path))


@node("TestSaveImage", is_output_node=True)
def save_image(image: io.Image, path: str):
    """Writes an IMAGE ``[batch, height, width, 3]`` unrounded as safetensors (key ``image``)."""
    save_file({"image": image.contiguous().cpu()}, output_path(path))


@node("TestSaveText", is_output_node=True)
def save_text(text: str, path: str):
    """Writes a STRING to a path under the output folder."""
    output_path(path).write_text(text)


@node("TestAppend", is_output_node=True)
def append(line: str, path: str, after: str):
    """Waits until the file `after` exists, without a time limit, then appends `line` to the file `path`."""
    while not Path(after).exists():
        comfy.model_management.throw_exception_if_processing_interrupted()
        time.sleep(0.01)
    with Path(path).open("a") as file:
        file.write(f"{line}\n")
