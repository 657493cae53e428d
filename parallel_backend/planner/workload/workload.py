"""One sampling job for planning: its size, steps and model."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from .checkpoint_model import CheckpointModel


@dataclass(frozen=True)
class Job:
    """The work to be sampled. `width`, `height`: pixels; `frames`: latent frames of a video, else 1; `prompts`: per
    image, 2 with CFG; `text`: tokens of a prompt, None for the model's usual number; `reference_tokens`: tokens of the
    reference images that each image attends to; `model_calls`: per step; `step_cache`: True if a step cache stores
    residuals; `patch_bytes`: memory of the model's patches (a ControlNet's network) on each device."""

    model: CheckpointModel
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
        tokens = self.model.family.image_tokens(self.width, self.height, self.frames)
        return tokens + self.reference_tokens

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
