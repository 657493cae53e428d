"""A checkpoint as its header tells it: what ComfyUI's process knows of a model, whose tensors only the ranks read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from ..requests import InputShapes
from ..strategy import ModelShape, ParallelStrategy
from .arithmetic import Family
from .dtypes import Dtypes
from .footprint import HeldWeights, MemoryPeak, TokenLoad


class ModelFile(Protocol):
    """A checked checkpoint of any family.

    `dtype`: torch's name of that of most of its bytes; `tensor_bytes`: of all that the model reads from it;
    `token_channels`: of a token as it leaves the model.
    """

    def __hash__(self) -> int: ...

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
        """The sizes that decide which strategies divide it."""

    @property
    def family(self) -> Family:
        """Its arithmetic."""

    @property
    def fingerprint(self) -> tuple[str, ...]:
        """Every size that decides how long a step takes: fine-tunes of a model have the same."""

    @property
    def token_channels(self) -> int: ...

    def describe(self) -> str:
        """The model by its sizes alone, since a file's name may be private."""

    def held_weights(
        self, dtypes: Dtypes, strategy: ParallelStrategy, rank: int, *, on_cpu: bool
    ) -> HeldWeights:
        """The weights that a rank holds."""

    def moments(self, block: int, call: TokenLoad, cast: int) -> Iterator[MemoryPeak]:
        """The memory alive while `block` computes. `cast`: bytes of its largest layer, where layers cast on use."""

    @property
    def inputs(self) -> InputShapes:
        """The widths of prompts and latents that it takes."""
