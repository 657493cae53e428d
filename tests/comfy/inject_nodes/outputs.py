"""Writes latents, images and texts of a graph under the output folder."""

from __future__ import annotations

import time
from pathlib import Path

import comfy.model_management
import folder_paths
from comfy_api.latest import io
from safetensors.torch import save_file

from .node import node, save


def output_path(path: str) -> Path:
    """``path`` under ComfyUI's output folder, its parents made."""
    target = Path(folder_paths.get_output_directory()) / path
    target.parent.mkdir(parents=True, exist_ok=True)
    return target


@save("TestSaveLatent", io.Latent.Input("latent"))
def save_latent(latent, path):
    """Write a LATENT's samples as safetensors (key ``samples``) to a path under the output folder."""
    save_file({"samples": latent["samples"].contiguous().cpu()}, output_path(path))


@save("TestSaveImage", io.Image.Input("image"))
def save_image(image, path):
    """Write an IMAGE ``[batch, height, width, 3]`` unrounded as safetensors (key ``image``)."""
    save_file({"image": image.contiguous().cpu()}, output_path(path))


@save("TestSaveText", io.String.Input("text", force_input=True))
def save_text(text, path):
    """Write a STRING to a path under the output folder."""
    output_path(path).write_text(text)


@node(
    "TestAppend",
    [
        io.String.Input("line"),
        io.String.Input("path", tooltip="absolute"),
        io.String.Input("after", tooltip="absolute"),
    ],
    is_output_node=True,
)
def append(line, path, after):
    """Appends a line to a file, once another one exists, however long that takes."""
    while not Path(after).exists():
        comfy.model_management.throw_exception_if_processing_interrupted()
        time.sleep(0.01)
    with Path(path).open("a") as file:
        file.write(f"{line}\n")
