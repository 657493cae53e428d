"""Writes latents, images and texts of a graph under the output folder."""

from __future__ import annotations

import time
from pathlib import Path

import comfy.model_management
import folder_paths
from comfy_api.latest import io
from safetensors.torch import save_file

from .category import CATEGORY


class TestSaveLatent(io.ComfyNode):
    """Write a LATENT's samples as safetensors (key ``samples``) to a path under the output folder."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="TestSaveLatent",
            category=CATEGORY,
            inputs=[io.Latent.Input("latent"), io.String.Input("path", default="latent.safetensors")],
            is_output_node=True,
        )

    @classmethod
    def execute(cls, latent, path) -> io.NodeOutput:
        save_file({"samples": latent["samples"].contiguous().cpu()}, output_path(path))
        return io.NodeOutput()


class TestSaveImage(io.ComfyNode):
    """Write an IMAGE ``[batch, height, width, 3]`` unrounded as safetensors (key ``image``)."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="TestSaveImage",
            category=CATEGORY,
            inputs=[io.Image.Input("image"), io.String.Input("path", default="image.safetensors")],
            is_output_node=True,
        )

    @classmethod
    def execute(cls, image, path) -> io.NodeOutput:
        save_file({"image": image.contiguous().cpu()}, output_path(path))
        return io.NodeOutput()


class TestSaveText(io.ComfyNode):
    """Write a STRING to a path under the output folder."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="TestSaveText",
            category=CATEGORY,
            inputs=[
                io.String.Input("text", force_input=True),
                io.String.Input("path", default="text.txt"),
            ],
            is_output_node=True,
        )

    @classmethod
    def execute(cls, text, path) -> io.NodeOutput:
        output_path(path).write_text(text)
        return io.NodeOutput()


class TestAppend(io.ComfyNode):
    """Appends a line to a file, once another one exists, however long that takes."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="TestAppend",
            category=CATEGORY,
            inputs=[
                io.String.Input("line"),
                io.String.Input("path", tooltip="absolute"),
                io.String.Input("after", tooltip="absolute"),
            ],
            is_output_node=True,
        )

    @classmethod
    def execute(cls, line, path, after) -> io.NodeOutput:
        while not Path(after).exists():
            comfy.model_management.throw_exception_if_processing_interrupted()
            time.sleep(0.01)
        with Path(path).open("a") as file:
            file.write(f"{line}\n")
        return io.NodeOutput()


def output_path(path: str) -> Path:
    """``path`` under ComfyUI's output folder, its parents made."""
    target = Path(folder_paths.get_output_directory()) / path
    target.parent.mkdir(parents=True, exist_ok=True)
    return target
