"""The facts in a checkpoint's header: all that ComfyUI's process knows of a model. Only ranks read its tensors."""

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

    `dtype`: torch's name of the dtype of most of its bytes; `tensor_bytes`: bytes of all tensors of the model;
    `token_channels`: channels of a token in the model's output.
    """

    def __hash__(self) -> int: ...

    @property
    def path(self) -> str: ...

    @property
    def name(self) -> str:
        """The file's name, to show to people."""

    @property
    def dtype(self) -> str: ...

    @property
    def tensor_bytes(self) -> int: ...

    @property
    def shape(self) -> ModelShape:
        """The sizes that decide which strategies can split the model."""

    @property
    def family(self) -> Family:
        """The sizes that decide its FLOPs."""

    @property
    def fingerprint(self) -> tuple[str, ...]:
        """Every size that decides how long a step takes. Fine-tunes of a model have the same fingerprint."""

    @property
    def token_channels(self) -> int: ...

    @property
    def why_less(self) -> str:
        """Why this model is split in fewer ways than others of its class, in words, else ""."""

    def describe(self) -> str:
        """Describes the model by its sizes alone, since a file's name may be private."""

    def held_weights(
        self, dtypes: Dtypes, strategy: ParallelStrategy, rank: int, *, on_cpu: bool
    ) -> HeldWeights:
        """Returns the weights that a rank holds."""

    def moments(self, block: int, call: TokenLoad, cast: int) -> Iterator[MemoryPeak]:
        """Yields the memory peaks of `block`. `cast`: bytes of its largest layer in the compute dtype, or 0."""

    @property
    def inputs(self) -> InputShapes:
        """The widths of the prompts and latents that it takes."""
