"""One sampling job for planning: its size, steps and model."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Protocol

from ...models.arithmetic import Family
from ...options import ComputeOptions
from ...strategy import ModelShape, ParallelStrategy
from .rank_memory import RankMemory


class JobModel(Protocol):
    """The model of a job. `weight_bytes`: bytes of all weights in the dtype that ranks store."""

    @property
    def family(self) -> Family: ...

    @property
    def shape(self) -> ModelShape: ...

    @property
    def weight_bytes(self) -> float: ...

    @property
    def compute_options(self) -> ComputeOptions: ...

    @property
    def uncompiled(self) -> JobModel:
        """The same model without compiled blocks."""

    def with_compile(self, mode: str) -> JobModel:
        """Returns the same model with `mode` (options.COMPILE_MODES) for its blocks."""

    @property
    def in_fp8(self) -> JobModel | None:
        """The same model with weights in fp8, None if they already are."""

    @property
    def key(self) -> str:
        """A key for the model in measurements, made of its sizes and how it is computed."""

    def memory(self, job: Job, strategy: ParallelStrategy, *, on_cpu: bool = False) -> tuple[RankMemory, ...]:
        """Predicts the memory of each rank of `strategy`, in rank order."""


@dataclass(frozen=True)
class Job:
    """The work to be sampled. `width`, `height`: pixels; `frames`: latent frames of a video, else 1; `prompts`: per
    image, 2 with CFG; `text`: tokens of a prompt, None for the model's usual number; `reference_tokens`: tokens of the
    reference images that each image attends to; `model_calls`: per step; `step_cache`: True if a step cache stores
    residuals; `patch_bytes`: memory of the model's patches (a ControlNet's network) on each device."""

    model: JobModel
    width: int = 1024
    height: int = 1024
    frames: int = 1
    batch: int = 1
    prompts: int = 1
    steps: int = 28
    text: int | None = None
    reference_tokens: int = 0
    model_calls: int = 1
    step_cache: bool = False
    patch_bytes: int = 0

    @property
    def has_cfg(self) -> bool:
        return self.prompts == 2

    @property
    def rows(self) -> int:
        """Rows of one model call: each image with each prompt."""
        return self.batch * self.prompts

    @property
    def image_tokens(self) -> int:
        """Tokens of one image and its references."""
        own = self.model.family.image_tokens(self.width, self.height, self.frames)
        return own + self.reference_tokens

    @property
    def text_tokens(self) -> int:
        return self.model.family.text_tokens if self.text is None else self.text

    @property
    def latent_size(self) -> tuple[int, int]:
        """Height and width in cells of the latent."""
        pixels = self.model.family.latent_pixels
        return -(-self.height // pixels), -(-self.width // pixels)

    @property
    def most_bands(self) -> float:
        """The largest number of bands of rows that an image can be cut into; infinite for models without bands."""
        rows = self.model.shape.band_rows
        return -(-self.latent_size[0] // rows) if rows else inf

    @property
    def flop(self) -> float:
        """FLOPs of one denoising step: all rows."""
        linear, attention = self.flop_parts
        return linear + attention

    @property
    def attention_share(self) -> float:
        """Attention's share of the FLOPs of a step."""
        linear, attention = self.flop_parts
        return attention / (linear + attention) if attention else 0.0

    @property
    def flop_parts(self) -> tuple[float, float]:
        """(linear, attention) FLOPs of one denoising step: all rows."""
        family = self.model.family
        if not family.is_transformer:  # convolutions dominate: in proportion to the pixels
            images = self.width * self.height / 1024**2
            return self.rows * family.image_flop * images, self.rows * family.image_attention * images**2
        image, text = self.image_tokens, self.text_tokens
        return self.rows * family.linear_flop(image, text), self.rows * family.attention_flop(image, text)
