"""From the model's velocities to the denoised latent: classifier-free guidance and the inpainting mask."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Guidance:
    """Works element by element on latents [B, C, h, w].

    `mask`: 1 where the latent is denoised, None everywhere; `cfg` counts where there are two velocities.
    """

    noise: Tensor
    latent: Tensor
    mask: Tensor | None
    cfg: float

    def model_input(self, x: Tensor, sigma: Tensor) -> Tensor:
        """Outside the mask the model sees the noised original."""
        if self.mask is None:
            return x
        return x * self.mask + noised(sigma, self.noise, self.latent) * (1 - self.mask)

    def denoised(self, x: Tensor, sigma: Tensor, velocities: list[Tensor]) -> Tensor:
        """x - sigma * v per prompt, then uncond + cfg * (cond - uncond); outside the mask the original.

        `x`: what the model saw.
        """
        found = [x - velocity * sigma for velocity in velocities]
        denoised = found[0] if len(found) == 1 else found[1] + (found[0] - found[1]) * self.cfg
        if self.mask is None:
            return denoised
        return denoised * self.mask + self.latent * (1 - self.mask)


def noised(sigma: Tensor, noise: Tensor, latent: Tensor) -> Tensor:
    """ComfyUI's start of flow models (CONST)."""
    return sigma * noise + (1 - sigma) * latent
