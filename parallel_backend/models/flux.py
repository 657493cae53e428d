"""Flux.1: a checked file to diffusers' transformer over the mapped file, and its forward on any subset of tokens.

A rank that holds a stage of a pipeline has a transformer for each chunk of blocks, made of the same class.
"""

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
    """A loaded Flux.1 on one rank: whole, as one chunk, or a stage of it. `bytes`: all the model's in the file."""

    chunks: tuple[FluxTransformer2DModel, ...]
    file: FluxFile
    compute_dtype: torch.dtype
    device: torch.device

    @property
    def bytes(self) -> int:
        return self.file.tensor_bytes

    @property
    def transformer(self) -> FluxTransformer2DModel:
        (whole,) = self.chunks
        return whole

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
        output, _ = self.through(
            0,
            img_tokens=img_tokens,
            context=context,
            pooled=pooled,
            sigma=sigma,
            guidance=guidance,
            img_ids=img_ids,
            txt_ids=txt_ids,
        )
        return output.float()

    def through(
        self,
        chunk: int,
        *,
        img_tokens: Tensor,
        context: Tensor,
        pooled: Tensor,
        sigma: Tensor,
        guidance: Tensor | None,
        img_ids: Tensor,
        txt_ids: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """What one chunk makes of (image, text).

        [r, n, 64] and [r, t, context_dim] go into the first chunk, [r, n or t, hidden] lie between chunks, and the last
        gives the image as [r, n, 64] again. The rest as in `velocity`.
        """
        dtype, transformer = self.compute_dtype, self.chunks[chunk]
        if self.file.dims.guidance and guidance is None:
            guidance = torch.full_like(sigma, DEFAULT_GUIDANCE)
        transformer.time_text_embed.exact_timestep = sigma
        (image,) = transformer(
            hidden_states=img_tokens.to(dtype),
            encoder_hidden_states=context.to(dtype),
            pooled_projections=pooled.to(dtype),
            timestep=sigma,
            guidance=guidance.to(dtype) if self.file.dims.guidance else None,
            img_ids=img_ids,
            txt_ids=txt_ids,
            return_dict=False,
        )
        return image, transformer.last_text.taken()


class _LastText(nn.Module):
    """Keeps the text that leaves a transformer's last block, which its forward drops; a forward hook."""

    def __init__(self) -> None:
        super().__init__()
        self._text: Tensor | None = None

    def __call__(self, block: nn.Module, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
        self._text = output[0]

    def taken(self) -> Tensor:
        text, self._text = self._text, None
        assert text is not None, "the last block ran"
        return text


class _Unchanged(nn.Module):
    """Stands where a chunk has no such layer: gives back its first argument."""

    def forward(self, hidden_states: Tensor, *rest: Tensor) -> Tensor:
        return hidden_states


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


def load(spec: ModelSpec, device: torch.device, stage: tuple[range, ...] | None = None) -> FluxModel:
    """Loads `spec` for one rank: the whole model, or only the chunks of blocks of `stage` (stages.split_blocks).

    On the CPU the parameters are views of the mapped file: no copy. On an accelerator each tensor goes there straight
    from the mapping. Raises CheckpointError for a file that is refused.
    """
    file = inspect_flux(spec.path)
    storage, compute = _dtypes(spec.weight_dtype, file.dtype, device)
    whole = range(file.dims.double_blocks + file.dims.single_blocks)
    chunks = tuple(_build(file, blocks, device, storage, compute) for blocks in stage or (whole,))
    return FluxModel(chunks, file, compute, device)


def _build(
    file: FluxFile,
    blocks: range,
    device: torch.device,
    storage: torch.dtype | None,
    compute: torch.dtype,
) -> FluxTransformer2DModel:
    """A transformer of the blocks `blocks` (doubles first), with embedders and last layer where they belong."""
    with torch.device("meta"):
        transformer = FluxTransformer2DModel(**_config(file.dims, blocks))
    if blocks.start > 0:
        transformer.x_embedder = transformer.context_embedder = _Unchanged()
    if blocks.stop < file.dims.double_blocks + file.dims.single_blocks:
        transformer.norm_out = transformer.proj_out = _Unchanged()
    names = _stored_names(file, transformer, blocks)
    transformer.load_state_dict(_parameters(file, names, device, storage, compute), strict=True, assign=True)
    if file.layout == "original" and not isinstance(transformer.norm_out, _Unchanged):
        transformer.norm_out.linear = HalvesSwapped(transformer.norm_out.linear)
    cast_on_use(transformer, compute)
    transformer.time_text_embed = _ExactTimestep(transformer.time_text_embed)
    transformer.last_text = _LastText()
    last = [*transformer.transformer_blocks, *transformer.single_transformer_blocks][-1]
    last.register_forward_hook(transformer.last_text)
    return transformer.requires_grad_(False).eval()


def _stored_names(file: FluxFile, transformer: FluxTransformer2DModel, blocks: range) -> dict[str, str]:
    """diffusers' name in the whole model of each parameter of a transformer that begins at block `blocks.start`."""
    doubles = file.dims.double_blocks
    first = {
        "transformer_blocks": min(blocks.start, doubles),
        "single_transformer_blocks": max(blocks.start - doubles, 0),
    }
    names = {}
    for name in transformer.state_dict():
        kind, _, rest = name.partition(".")
        if kind in first:
            index, _, rest = rest.partition(".")
            names[name] = f"{kind}.{int(index) + first[kind]}.{rest}"
        else:
            names[name] = name
    return names


def _config(dims: FluxDims, blocks: range) -> dict[str, object]:
    doubles = range(blocks.start, min(blocks.stop, dims.double_blocks))
    return {
        "patch_size": 1,
        "in_channels": dims.in_channels,
        "out_channels": dims.out_channels,
        "num_layers": len(doubles),
        "num_single_layers": len(blocks) - len(doubles),
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
    file: FluxFile,
    names: dict[str, str],
    device: torch.device,
    storage: torch.dtype | None,
    compute: torch.dtype,
) -> dict[str, Tensor]:
    """The state dict whose entries are named `names` in the whole model; on the CPU views of the mapping wherever the
    dtype allows."""
    sources = diffusers_sources(file.dims)
    try:
        opened = safe_open(file.path, framework="pt", device="cpu")
    except (SafetensorError, OSError):  # its header was sound a moment ago
        raise CheckpointError(
            f"{file.name} is refused: it changed while it was opened. Wait until it is written, and try again."
        ) from None
    with opened:
        mapped = {}
        for own, name in names.items():
            if file.layout == "diffusers":
                mapped[own] = opened.get_tensor(file.stored_key(name))
            else:
                source = sources[name]
                mapped[own] = opened.get_tensor(file.stored_key(source.key))[source.start : source.stop]
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
