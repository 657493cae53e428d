"""A checkpoint as its header tells it: what ComfyUI's process knows of a model, whose tensors only the ranks read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from ..layout import RankCoordinates
from ..requests import InputShapes
from ..strategy import ModelShape, ParallelStrategy
from .arithmetic import Family
from .dtypes import Dtypes
from .footprint import HeldWeights, Moment, TokenLoad


class ModelFile(Protocol):
    """A checked checkpoint of any family.

    `dtype`: torch's name of that of most of its bytes; `tensor_bytes`: of all that the model reads from it;
    `hidden_size`: width of a token between blocks; `context_dim`, `pooled_dim`: of a prompt; `latent_channels`: of the
    latent; `token_channels`: of a token as it leaves the model; `has_guidance`: it embeds a guidance strength.
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
    def block_counts(self) -> tuple[int, ...]:
        """The number of blocks of each kind, in the order in which they are numbered."""

    @property
    def hidden_size(self) -> int: ...

    @property
    def context_dim(self) -> int: ...

    @property
    def pooled_dim(self) -> int: ...

    @property
    def latent_channels(self) -> int: ...

    @property
    def token_channels(self) -> int: ...

    @property
    def has_guidance(self) -> bool: ...

    def describe(self) -> str:
        """The model by its sizes alone, since a file's name may be private."""

    def blocks_of_stage(self, strategy: ParallelStrategy, place: RankCoordinates) -> range:
        """The blocks that a rank runs: those of its pipeline's stage, or all."""

    def held_weights(
        self, dtypes: Dtypes, strategy: ParallelStrategy, rank: int, *, on_cpu: bool
    ) -> HeldWeights:
        """The weights that a rank holds."""

    def moments(self, block: int, call: TokenLoad, cast: int) -> Iterator[Moment]:
        """The memory alive while `block` computes. `cast`: bytes of its largest layer, where layers cast on use."""

    @property
    def inputs(self) -> InputShapes:
        """The widths of prompts and latents that it takes."""
