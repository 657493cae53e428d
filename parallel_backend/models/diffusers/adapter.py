"""Adapts diffusers' Flux.1 to the signature of ComfyUI's Flux: it takes the same call and gives the same output."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from diffusers.models.transformers.transformer_flux import FluxTransformer2DModel
from torch import Tensor, nn

from ...errors import RequestError
from ..tokens.table import unusual_options
from .exact_timestep import PooledAtTime
from .packing import image_ids, pack, text_ids, unpack
from .reference_places import reference_places

# Keyword arguments that ComfyUI's Flux takes in addition to those in its signature.
_KNOWN = {"attention_mask", "ref_latents_method"}

# A ControlNet's residuals, one per block in order: [B, n, width], added to the first n image tokens after the block.
Residuals = Sequence[Tensor | None]


class DiffusersFlux(nn.Module):
    """A module that calls `transformer` with the arguments of ComfyUI's Flux. `dtype`: compute dtype. The transformer's
    time embedding must take a PooledAtTime. A call raises RequestError for what only ComfyUI's module can do."""

    def __init__(self, transformer: FluxTransformer2DModel, dtype: torch.dtype) -> None:
        super().__init__()
        self.transformer = transformer
        self.dtype = dtype

    def forward(
        self,
        x: Tensor,
        timestep: Tensor,
        context: Tensor,
        y: Tensor | None = None,
        guidance: Tensor | None = None,
        ref_latents: Sequence[Tensor] | None = None,
        control: Mapping[str, Residuals] | None = None,
        transformer_options: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Maps x [B, C, h, w], timestep [B], context [B, t, channels], y [B, channels] to [B, C, h, w]."""
        _check_honoured(transformer_options or {}, kwargs)
        height, width = x.shape[-2:]
        references = ref_latents or ()
        places = reference_places(references, (height, width), kwargs.get("ref_latents_method"))
        tokens, ids = [pack(x)], [image_ids(height, width, x.device)]
        for latent, place in zip(references, places, strict=True):
            tokens.append(pack(latent.expand(len(x), *latent.shape[1:]).to(x)))
            rows, columns = latent.shape[-2:]
            ids.append(image_ids(rows, columns, x.device, torch.tensor([*place, 1.0, 1.0])))
        config = self.transformer.config
        channels = config.pooled_projection_dim
        pooled = x.new_zeros(len(x), channels) if y is None else y[:, :channels]
        distilled = config.guidance_embeds and guidance is not None
        with self._adding(control):
            (image,) = self.transformer(
                hidden_states=torch.cat(tokens, dim=1).to(self.dtype),
                encoder_hidden_states=context.to(self.dtype),
                pooled_projections=PooledAtTime(pooled.to(self.dtype), timestep.float()),
                timestep=timestep,
                guidance=guidance.to(self.dtype) if distilled and guidance is not None else None,
                img_ids=torch.cat(ids),
                txt_ids=text_ids(context.shape[1], x.device),
                joint_attention_kwargs=_mask_arguments(kwargs.get("attention_mask")),
                return_dict=False,
            )
        return unpack(image[:, : tokens[0].shape[1]], height, width)

    @contextmanager
    def _adding(self, control: Mapping[str, Residuals] | None) -> Iterator[None]:
        """Makes blocks add a ControlNet's residuals to their image tokens while the context is open. There may be fewer
        residuals than blocks."""
        kinds = {
            "input": self.transformer.transformer_blocks,
            "output": self.transformer.single_transformer_blocks,
        }
        with ExitStack() as restore:
            for kind, blocks in kinds.items():
                residuals = (control or {}).get(kind, ())
                for number, block in zip(range(len(residuals)), blocks):  # noqa: B905
                    hook = partial(_add_residual, residuals, number)
                    restore.callback(block.register_forward_hook(hook).remove)
            yield


def _add_residual(
    residuals: Residuals, number: int, block: nn.Module, args: Any, out: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    """Adds a residual, as a forward hook. Reads it late: ranks that split tokens cut residuals at the first block."""
    text, image = out
    added = residuals[number]
    if added is None:
        return out
    image = image.clone()  # a pipeline stage may still be sending the tensor that the block got
    image[:, : added.shape[1]] += added
    return text, image


def _mask_arguments(mask: Tensor | None) -> dict[str, Tensor]:
    """Returns ComfyUI's attention mask as diffusers' joint_attention_kwargs: [B, 1, S, S]."""
    if mask is None:
        return {}
    if mask.ndim == 2:
        mask = mask.unsqueeze(0)
    return {"attention_mask": mask.unsqueeze(1) if mask.ndim == 3 else mask}


def _check_honoured(options: Mapping[str, Any], kwargs: Mapping[str, Any]) -> None:
    """Raises RequestError with the names of functions and arguments that only ComfyUI's own module uses."""
    unknown = sorted(unusual_options(options))
    unknown += sorted(name for name, value in kwargs.items() if value is not None and name not in _KNOWN)
    if unknown:
        raise RequestError(
            f"A node gave the model {', '.join(unknown)}, which only ComfyUI's own Flux takes, and this model runs by "
            f"diffusers. Load it with implementation comfyui, or remove the node."
        )
