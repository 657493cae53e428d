"""A checkpoint as its header tells it: what ComfyUI's process knows of a model, whose tensors only the ranks read."""

from __future__ import annotations

from typing import Protocol

from ..requests import InputShapes
from ..strategy import ModelShape


class ModelFile(Protocol):
    """A checked checkpoint of any family. `dtype`: torch's name of that of most of its bytes; `tensor_bytes`: of all
    that the model reads from it."""

    @property
    def path(self) -> str: ...

    @property
    def name(self) -> str:
        """For people: the file's name."""

    @property
    def dtype(self) -> str: ...

    @property
    def tensor_bytes(self) -> int: ...

    @property
    def shape(self) -> ModelShape:
        """What decides which strategies divide it."""

    @property
    def inputs(self) -> InputShapes:
        """The widths of prompts and latents that it takes."""
