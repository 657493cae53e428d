"""Nodes that write tensors and texts of a graph to files."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import comfy.model_management
import folder_paths
import torch
from comfy.nested_tensor import NestedTensor
from comfy_api.latest import io
from safetensors.torch import save_file

from .node import node


def output_path(path: str) -> Path:
    """Returns ``path`` under ComfyUI's output folder, after creating its parent folders."""
    target = Path(folder_paths.get_output_directory()) / path
    target.parent.mkdir(parents=True, exist_ok=True)
    return target


@node("TestSave", is_output_node=True)
def save(value: io.AnyType, path: str):
    """Writes the tensors of any value as safetensors to a path under the output folder. Their keys are their places in
    the value; an IMAGE, and the samples of a LATENT, have the key ``tensor``."""
    save_file(
        {name or "tensor": one.contiguous().cpu() for name, one in _tensors(value, "")}, output_path(path)
    )


def _tensors(value: object, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, dict) and "samples" in value:  # a LATENT
        value = value["samples"]
    if isinstance(value, NestedTensor):  # of a LATENT in several parts, such as video and sound
        value = torch.cat([part.flatten(1) for part in value.unbind()], dim=1)
    if isinstance(value, torch.Tensor):
        yield name, value.clone()
    elif isinstance(value, (list, tuple)):
        for number, one in enumerate(value):
            yield from _tensors(one, f"{name}.{number}")
    elif isinstance(value, dict) or type(value).__name__ == "Output":  # of CLIP vision
        for key, one in (value if isinstance(value, dict) else vars(value)).items():
            yield from _tensors(one, f"{name}.{key}")


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
