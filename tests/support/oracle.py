"""The oracle: diffusers' own single-process forward and a plain Euler loop in fp32, without code of the engines."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from diffusers.models.transformers.transformer_flux import FluxTransformer2DModel
from safetensors.torch import load_file

from tiny_flux import tiny_flux_config, write_tiny_flux


def oracle_model(folder, **sizes) -> FluxTransformer2DModel:
    """Returns diffusers' transformer with the weights of `write_tiny_flux(**sizes)`, read from its diffusers layout."""
    path = write_tiny_flux(folder / "oracle.safetensors", layout="diffusers", **sizes)
    model = FluxTransformer2DModel(**tiny_flux_config(**sizes))
    model.load_state_dict(load_file(path))
    return model.eval().requires_grad_(False)


def oracle_subject(folder, cases, **sizes):
    """Returns (path of a tiny Flux, {case: its latent}, diffusers' own model with the same weights)."""
    model = oracle_model(folder, **sizes)
    path = str(write_tiny_flux(folder / "tiny.safetensors", **sizes))
    return path, {name: oracle_sample(model, case) for name, case in cases.items()}, model


@torch.no_grad()
def oracle_velocity(model, x, sigma, prompt):
    """Returns the velocity [1, 16, h, w] for x [1, 16, h, w]: one image, one prompt, one call."""
    height, width = x.shape[2:]
    cells = F.pixel_unshuffle(F.pad(x, (0, width % 2, 0, height % 2), mode="circular"), 2)
    rows, columns = cells.shape[2:]
    ids = torch.tensor([[0.0, r, c] for r in range(rows) for c in range(columns)])
    (out,) = model(
        hidden_states=cells.flatten(2).transpose(1, 2),
        encoder_hidden_states=prompt.context[:1],
        pooled_projections=prompt.pooled[:1],
        timestep=sigma.reshape(1),
        guidance=prompt.guidance if model.config.guidance_embeds else None,
        img_ids=ids,
        txt_ids=torch.zeros(prompt.context.shape[1], 3),
        return_dict=False,
    )
    image = F.pixel_shuffle(out.transpose(1, 2).unflatten(2, (rows, columns)), 2)
    return image[:, :, :height, :width]


def oracle_sample(model, request):
    """Runs the Euler loop, one image and one prompt at a time, and returns the latent."""
    images = []
    for b in range(request.noise.shape[0]):
        x = request.sigmas[0] * request.noise[b : b + 1]
        for sigma, following in zip(request.sigmas[:-1], request.sigmas[1:], strict=True):
            velocity = oracle_velocity(model, x, sigma, request.positive)
            if request.cfg != 1.0:
                uncond = oracle_velocity(model, x, sigma, request.negative)
                velocity = uncond + request.cfg * (velocity - uncond)
            x = x + (following - sigma) * velocity
        images.append(x)
    return torch.cat(images)
