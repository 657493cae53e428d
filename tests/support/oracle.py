"""The oracle: diffusers' own single-process forward and a plain Euler loop in fp32, without code of the engines.

For PipeFusion each patch of a step is one forward of the patch's image tokens and its share of the text tokens. Every
attention stores the keys and values of all tokens and replaces those of the given tokens (PipeFusion, section 3).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from diffusers.models.transformers.transformer_flux import FluxTransformer2DModel
from safetensors.torch import load_file

from parallel_backend.layout import slice_of, split_sizes
from parallel_backend.models.attention import attention_by
from parallel_backend.models.diffusers.compat_diffusers import patch_diffusers
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


class _StaleKeys:
    """Attention over the newest keys and values of all tokens. `places`: positions of the next call's tokens."""

    def __init__(self, layers: int) -> None:
        self.layers, self.kept, self.layer, self.places = layers, {}, 0, None

    def attend(self, library, call):
        """Returns the attention [B, H, n, D] of inputs [B, H, n, D]."""
        query, key, value = (tensor.transpose(1, 2) for tensor in (call.q, call.k, call.v))
        kept = self.kept.setdefault(self.layer, {})
        for n, place in enumerate(self.places):
            kept[place] = key[:, n], value[:, n]
        self.layer = (self.layer + 1) % self.layers
        keys, values = (torch.stack(part, dim=1).transpose(1, 2) for part in zip(*kept.values(), strict=True))
        scores = query.transpose(1, 2) @ keys.transpose(2, 3) / query.shape[-1] ** 0.5
        return scores.softmax(dim=-1) @ values


@torch.no_grad()
def patchwise_sample(model, request, warmup_steps, patches):
    """Runs Euler steps for one image with even sides and one prompt; returns the latent. `patches`: image tokens of
    each patch."""
    rows, columns = (side // 2 for side in request.noise.shape[-2:])
    layers = len(model.transformer_blocks) + len(model.single_transformer_blocks)
    attention, text = _StaleKeys(layers), request.positive.context.shape[1]
    patch_diffusers("cpu")
    ids = torch.tensor([[0.0, r, c] for r in range(rows) for c in range(columns)])

    def velocity(x, sigma, part, words):
        attention.places = [*(("text", n) for n in words), *(("image", n) for n in part)]
        with attention_by(attention.attend):
            (out,) = model(
                hidden_states=x[:, part],
                encoder_hidden_states=request.positive.context[:, words],
                pooled_projections=request.positive.pooled,
                timestep=sigma.reshape(1),
                guidance=request.positive.guidance if model.config.guidance_embeds else None,
                img_ids=ids[part],
                txt_ids=torch.zeros(len(words), 3),
                return_dict=False,
            )
        return out

    x = F.pixel_unshuffle(request.sigmas[0] * request.noise, 2).flatten(2).transpose(1, 2).contiguous()
    everything, words = list(range(rows * columns)), list(range(text))
    texts = split_sizes(text, len(patches))
    parts = [(everything[slice_of(patches, i)], words[slice_of(texts, i)]) for i in range(len(patches))]
    for i, (sigma, following) in enumerate(zip(request.sigmas[:-1], request.sigmas[1:], strict=True)):
        for part, said in [(everything, words)] if i < warmup_steps else parts:
            x[:, part] += (following - sigma) * velocity(x, sigma, part, said)
    return F.pixel_shuffle(x.transpose(1, 2).unflatten(2, (rows, columns)), 2)
