"""Attention with the signature of ComfyUI's functions, by torch alone."""

from __future__ import annotations

import torch.nn.functional as F


def optimized(q, k, v, heads, mask=None, skip_reshape=False, skip_output_reshape=False, scale=None, **others):
    """Computes attention with the shapes of ComfyUI's functions; several heads may share keys, or values. `others`: of
    their arguments, without effect here."""
    if not skip_reshape:
        channels = q.shape[-1] // heads
        q, k, v = (t.unflatten(-1, (-1, channels)).transpose(1, 2) for t in (q, k, v))
    k, v = (t.repeat_interleave(heads // t.shape[1], 1) for t in (k, v))
    if mask is not None:
        mask = mask[(None,) * (4 - mask.ndim)] if mask.ndim != 3 else mask[:, None]
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    return out if skip_output_reshape else out.transpose(1, 2).flatten(2)
