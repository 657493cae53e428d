"""The oracle for PipeFusion's patches: diffusers' full model in one process. It shares no code with the engines.

Each patch of a step is one forward of the patch's image tokens and its share of the text tokens. Every attention stores
the keys and values of all tokens and replaces those of the given tokens (PipeFusion, section 3).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from parallel_backend.layout import slice_of, split_sizes
from parallel_backend.models.attention import attention_by
from parallel_backend.models.diffusers.compat_diffusers import patch_diffusers


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
