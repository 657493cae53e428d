"""Flux.1: a checked file to diffusers' transformer over the mapped file, and its forward on any subset of tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from diffusers.models.transformers.transformer_flux import FluxTransformer2DModel
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from ..errors import CheckpointError, RequestError
from ..flux_file import AXES_DIMS, FluxFile, inspect_flux
from ..flux_keys import FluxDims, diffusers_sources
from ..requests import WEIGHT_DTYPES, ModelSpec
from .casting import HalvesSwapped, cast_on_use

DEFAULT_GUIDANCE = 3.5  # what ComfyUI gives a guidance-distilled Flux when the conditioning names none
_FP8 = torch.float8_e4m3fn


@dataclass(frozen=True)
class FluxModel:
    """A loaded Flux.1 on one rank. `bytes`: its tensors in the file."""

    transformer: FluxTransformer2DModel
    file: FluxFile
    compute_dtype: torch.dtype
    device: torch.device

    @property
    def bytes(self) -> int:
        return self.file.tensor_bytes

    def velocity(
        self,
        *,
        img_tokens: Tensor,
        context: Tensor,
        pooled: Tensor,
        sigma: Tensor,
        guidance: Tensor | None,
        img_ids: Tensor,
        txt_ids: Tensor,
    ) -> Tensor:
        """The transformer's output for the tokens it is given, which may be one rank's share.

        img_tokens [r, n, 64], context [r, t, context_dim], pooled [r, pooled_dim], sigma [r] float32,
        guidance [r] or None, img_ids [n, 3], txt_ids [t, 3] -> [r, n, 64] float32. Everything but attention works
        token by token, so a share needs no more than its own tokens.
        """
        dtype = self.compute_dtype
        if self.file.dims.guidance and guidance is None:
            guidance = torch.full_like(sigma, DEFAULT_GUIDANCE)
        self.transformer.time_text_embed.exact_timestep = sigma
        (output,) = self.transformer(
            hidden_states=img_tokens.to(dtype),
            encoder_hidden_states=context.to(dtype),
            pooled_projections=pooled.to(dtype),
            timestep=sigma,
            guidance=guidance.to(dtype) if self.file.dims.guidance else None,
            img_ids=img_ids,
            txt_ids=txt_ids,
            return_dict=False,
        )
        return output.float()


class _ExactTimestep(nn.Module):
    """Embeds the timestep unrounded, as ComfyUI does; the transformer would first round it to the compute dtype.

    The forward it sits in passes the rounded one; the caller sets `exact_timestep` ([r] float32) before each call.
    """

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.exact_timestep: Tensor | None = None

    def forward(self, timestep: Tensor, *rest: Tensor) -> Tensor:
        return self.inner(self.exact_timestep * 1000, *rest)


def load(spec: ModelSpec, device: torch.device) -> FluxModel:
    """Loads `spec` for one rank.

    On the CPU the parameters are views of the mapped file: no copy. On an accelerator each tensor goes there straight
    from the mapping. Raises CheckpointError for a file that is refused.
    """
    file = inspect_flux(spec.path)
    storage, compute = _dtypes(spec.weight_dtype, file.dtype, device)
    with torch.device("meta"):
        transformer = FluxTransformer2DModel(**_config(file.dims))
    transformer.load_state_dict(_parameters(file, device, storage, compute), strict=True, assign=True)
    if file.layout == "original":
        transformer.norm_out.linear = HalvesSwapped(transformer.norm_out.linear)
    cast_on_use(transformer, compute)
    transformer.time_text_embed = _ExactTimestep(transformer.time_text_embed)
    transformer.requires_grad_(False).eval()
    return FluxModel(transformer, file, compute, device)


def _config(dims: FluxDims) -> dict[str, object]:
    return {
        "patch_size": 1,
        "in_channels": dims.in_channels,
        "out_channels": dims.out_channels,
        "num_layers": dims.double_blocks,
        "num_single_layers": dims.single_blocks,
        "attention_head_dim": dims.head_dim,
        "num_attention_heads": dims.heads,
        "joint_attention_dim": dims.context_dim,
        "pooled_projection_dim": dims.pooled_dim,
        "guidance_embeds": dims.guidance,
        "axes_dims_rope": AXES_DIMS,
    }


def _dtypes(wish: str, file_dtype: str, device: torch.device) -> tuple[torch.dtype | None, torch.dtype]:
    """(storage dtype of the large weights, None to keep the file's; compute dtype).

    The CPU keeps the mapped file as it is and casts on use. `auto` there computes halves in float32, as ComfyUI does.
    """
    if wish not in WEIGHT_DTYPES:
        raise RequestError(f"weight_dtype {wish!r} is unknown; choose one of {', '.join(WEIGHT_DTYPES)}.")
    stored = getattr(torch, file_dtype)
    if wish == "float8_e4m3fn" or (wish == "auto" and stored == _FP8):
        return (None if stored == _FP8 else _FP8), torch.bfloat16
    if wish == "auto":
        return None, (torch.float32 if device.type == "cpu" else stored)
    compute = getattr(torch, wish)
    return (None if device.type == "cpu" else compute), compute


def _parameters(
    file: FluxFile, device: torch.device, storage: torch.dtype | None, compute: torch.dtype
) -> dict[str, Tensor]:
    """diffusers' state dict; on the CPU views of the mapping wherever the dtype allows."""
    try:
        opened = safe_open(file.path, framework="pt", device="cpu")
    except (SafetensorError, OSError):  # its header was sound a moment ago
        raise CheckpointError(
            f"{file.name} is refused: it changed while it was opened. Wait until it is written, and try again."
        ) from None
    with opened:
        if file.layout == "diffusers":
            mapped = {name: opened.get_tensor(file.stored_key(name)) for name in diffusers_sources(file.dims)}
        else:
            originals = {key: opened.get_tensor(file.stored_key(key)) for key in file.original_shapes}
            mapped = {
                name: originals[source.key][source.start : source.stop]
                for name, source in diffusers_sources(file.dims).items()
            }
    return {name: _placed(name, tensor, device, storage, compute) for name, tensor in mapped.items()}


def _placed(
    name: str, tensor: Tensor, device: torch.device, storage: torch.dtype | None, compute: torch.dtype
) -> Tensor:
    """The tensor on its device: norms in the compute dtype, linear layers in the storage dtype."""
    if ".norm_" in name:
        return tensor.to(device).to(compute)
    if storage == _FP8 and "transformer_blocks." not in name:
        storage = compute  # embedders and the last layer are small and sensitive
    if storage == _FP8 and name.endswith(".bias"):
        storage = compute
    return tensor.to(device).to(storage or tensor.dtype)
