"""Flux.1: a checked file to diffusers' transformer over the mapped file, and its forward on any subset of tokens.

A rank that holds a stage of a pipeline has a transformer for each chunk of blocks, made of the same class.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
from diffusers.hooks.tensor_parallel import TPShardSpec
from diffusers.models.transformers.transformer_flux import FluxTransformer2DModel
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from ...errors import CheckpointError, RequestError
from ...requests import WEIGHT_DTYPES, ModelSpec
from ...wire.heartbeat import heartbeat
from ..block_list import BlockList
from ..casting import HalvesSwapped, cast_on_use
from .checkpoint import AXES_DIMS, FluxFile, inspect_flux
from .keys import FluxDims, diffusers_sources
from .tensor_parallel import Slices, slice_layers, take_slice
from .tensors import diffusers_part
from .weights import FluxWeights, HeldParameter

_FP8 = torch.float8_e4m3fn

# What a ControlNet adds to the image tokens after a block (numbered doubles first): [r, n, hidden], or None.
Residuals = Callable[[int], Tensor | None]

# Shares the parameters of a transformer on the meta device out over ranks. Returns for each, by name, this rank's share
# of it in memory, still to be filled, and which rows of the parameter that is.
Shard = Callable[[FluxTransformer2DModel], dict[str, tuple[Tensor, slice]]]


class Gathers(Protocol):
    """How the ranks that share the weights out gather them for their calls. `blocks`: numbered doubles first."""

    def join_gathers(self, blocks: range | None = None) -> None:
        """Takes part in what a call, through `blocks` or all of them, gathers where only other ranks make it."""

    def only(self, blocks: range) -> AbstractContextManager[None]:
        """Inside, calls go through `blocks` alone, so no other block's weights travel ahead."""


@dataclass(frozen=True)
class FluxModel:
    """A loaded Flux.1 on one rank: whole, as one chunk, or a stage of it. `bytes`: all the model's in the file.

    `blocks`: of each chunk, numbered doubles first.
    `weights`: what of it LoRAs change.
    `gathers`: where each rank has a share of the weights; None where it has all it needs.
    """

    chunks: tuple[FluxTransformer2DModel, ...]
    blocks: tuple[range, ...]
    file: FluxFile
    compute_dtype: torch.dtype
    device: torch.device
    weights: FluxWeights
    gathers: Gathers | None = None

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
        residuals: Residuals | None = None,
    ) -> Tensor:
        """The transformer's output for the tokens it is given, which may be one rank's share.

        img_tokens [r, n, in_channels], context [r, t, context_dim], pooled [r, pooled_dim], sigma [r] float32,
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
            residuals=residuals,
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
        residuals: Residuals | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """What one chunk makes of (image, text); no text where its last block is left out (flux_parts.py).

        [r, n, in_channels] and [r, t, context_dim] go into the first chunk, [r, n or t, hidden] lie between chunks, and
        the last gives the image as [r, n, 64]. The rest as in `velocity`.
        """
        dtype, transformer = self.compute_dtype, self.chunks[chunk]
        guided = self.file.dims.guidance and guidance is not None
        transformer.time_text_embed.exact_timestep = sigma
        with self._without_grad():
            (image,) = transformer(
                hidden_states=img_tokens.to(dtype),
                encoder_hidden_states=context.to(dtype),
                pooled_projections=pooled.to(dtype),
                timestep=sigma,
                guidance=guidance.to(dtype) if guided else None,
                img_ids=img_ids,
                txt_ids=txt_ids,
                return_dict=False,
                **self._added(chunk, residuals),
            )
        return image, transformer.last_text.taken()

    def _added(self, chunk: int, residuals: Residuals | None) -> dict[str, list[Tensor]]:
        """`residuals` as diffusers takes them: one for each block of a kind, or none for that kind."""
        if residuals is None:
            return {}
        doubles, own = self.file.dims.double_blocks, self.blocks[chunk]
        kinds = {
            "controlnet_block_samples": range(own.start, min(own.stop, doubles)),
            "controlnet_single_block_samples": range(max(own.start, doubles), own.stop),
        }
        nothing = torch.zeros(1, 1, 1, dtype=self.compute_dtype, device=self.device)
        added = {}
        for name, blocks in kinds.items():
            found = [residuals(block) for block in blocks]
            if any(residual is not None for residual in found):
                added[name] = [nothing if r is None else r.to(self.compute_dtype) for r in found]
        return added

    @contextmanager
    def _without_grad(self) -> Iterator[None]:
        """Weights that are gathered go where an earlier call left room for them, which inference mode forbids."""
        with (
            torch.inference_mode(torch.is_inference_mode_enabled() and self.gathers is None),
            torch.no_grad(),
        ):
            yield


class _LastText(nn.Module):
    """Keeps the text that leaves a transformer's last block, which its forward drops; a forward hook."""

    def __init__(self) -> None:
        super().__init__()
        self._text: Tensor | None = None

    def __call__(self, block: nn.Module, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
        self._text = output[0]

    def taken(self) -> Tensor | None:
        """None where the last block did not run."""
        text, self._text = self._text, None
        return text


class _Unchanged(nn.Module):
    """Stands where a chunk has no such layer: gives back its first argument."""

    def forward(self, hidden_states: Tensor, *rest: Tensor) -> Tensor:
        return hidden_states


class _ExactTimestep(nn.Module):
    """Embeds the timestep unrounded, as ComfyUI does; the transformer would first round it to the compute dtype.

    The forward it sits in passes the rounded one; the caller sets `exact_timestep` ([r] float32) before each call. As
    in ComfyUI, a guidance-distilled model that is given no guidance (FluxDisableGuidance) embeds none.
    """

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.exact_timestep: Tensor | None = None

    def forward(self, timestep: Tensor, *rest: Tensor) -> Tensor:
        exact, inner = self.exact_timestep * 1000, self.inner
        if len(rest) > 1 or not hasattr(inner, "guidance_embedder"):
            return inner(exact, *rest)
        (pooled,) = rest
        return inner.timestep_embedder(inner.time_proj(exact).to(pooled.dtype)) + inner.text_embedder(pooled)


def load(
    spec: ModelSpec,
    device: torch.device,
    stage: tuple[range, ...] | None = None,
    slices: Slices | None = None,
    shard: Shard | None = None,
) -> FluxModel:
    """Loads `spec` for one rank: the whole model, or only the chunks of blocks of `stage` (stages.split_blocks), only
    this rank's slice of each layer, only the rows of each parameter that `shard` leaves to it.

    On the CPU the parameters are views of the mapped file: no copy, but for shares that `shard` has made. On an
    accelerator each tensor goes there straight from the mapping. Raises CheckpointError for a file that is refused.
    """
    file = inspect_flux(spec.path)
    storage, compute = _dtypes(spec.weight_dtype, file.dtype, device)
    whole = range(file.dims.double_blocks + file.dims.single_blocks)
    parameters = _Parameters(file, _opened(file), storage, compute, slices)
    chunks, held = [], []
    stage = stage or (whole,)

    def progress(part: float) -> None:
        heartbeat.loading((len(chunks) + part) / len(stage))

    for blocks in stage:
        chunk, parts = _build(parameters, blocks, device, shard, progress)
        if chunks:  # the embedding of time and text is every chunk's: one copy will do
            chunk.time_text_embed = chunks[0].time_text_embed
            parts = [part for part in parts if not part.name.startswith("time_text_embed.")]
        chunks.append(chunk)
        held += parts
    weights = FluxWeights(
        file, held, device, read=parameters.read, mapped=parameters.mapped, cut=parameters.cut
    )
    return FluxModel(tuple(chunks), tuple(stage), file, compute, device, weights)


def _opened(file: FluxFile) -> safe_open:
    """The mapped file; it stays open as long as the model, which reads it again when a LoRA goes."""
    try:
        return safe_open(file.path, framework="pt", device="cpu")
    except (SafetensorError, OSError):  # its header was sound a moment ago
        raise CheckpointError(
            f"{file.name} is refused: it changed while it was opened. Wait until it is written, and try again."
        ) from None


class _Parameters:
    """What diffusers' parameters are made of: rows of the file's tensors, and this rank's slice of those."""

    def __init__(
        self,
        file: FluxFile,
        opened: safe_open,
        storage: torch.dtype | None,
        compute: torch.dtype,
        slices: Slices | None,
    ) -> None:
        self.file = file
        self.compute = compute
        self._opened = opened
        self._storage = storage
        self._slices = slices
        self._sources = diffusers_sources(file.dims)

    def slice_layers(self, transformer: FluxTransformer2DModel) -> dict[str, TPShardSpec]:
        return {} if self._slices is None else slice_layers(transformer, self._slices)

    def mapped(self, name: str, spec: TPShardSpec | None, rows: slice = slice(None)) -> Tensor:
        """Rows of this rank's slice of the parameter that is called `name` in the whole model, as in the file."""
        file = self.file
        if file.layout == "diffusers":
            return self.cut(self.read(file.stored_key(name)), spec, rows)
        source = self._sources[name]
        return self.cut(diffusers_part(file, self.read(file.stored_key(source.key)), source), spec, rows)

    def read(self, stored_key: str) -> Tensor:
        """A tensor of the file: a view of the mapping."""
        return self._opened.get_tensor(stored_key)

    def cut(self, tensor: Tensor, spec: TPShardSpec | None, rows: slice) -> Tensor:
        """Rows of this rank's slice of a whole parameter."""
        return tensor[rows] if spec is None else take_slice(tensor, spec, self._slices, rows)

    def dtype(self, name: str, stored: torch.dtype) -> torch.dtype:
        """What it is kept in: norms in the compute dtype, linear layers in the storage dtype."""
        if ".norm_" in name:
            return self.compute
        if self._storage == _FP8 and ("transformer_blocks." not in name or name.endswith(".bias")):
            return self.compute  # embedders and the last layer are small and sensitive
        return self._storage or stored


def _build(
    parameters: _Parameters,
    blocks: range,
    device: torch.device,
    shard: Shard | None,
    progress: Callable[[float], None],
) -> tuple[FluxTransformer2DModel, list[HeldParameter]]:
    """A transformer of the blocks `blocks` (doubles first), with embedders and last layer where they belong, and what
    its parameters are in the whole model."""
    file = parameters.file
    with torch.device("meta"):
        transformer = FluxTransformer2DModel(**_config(file.dims, blocks))
    if blocks.start > 0:
        transformer.x_embedder = transformer.context_embedder = _Unchanged()
    if blocks.stop < file.dims.double_blocks + file.dims.single_blocks:
        transformer.norm_out = transformer.proj_out = _Unchanged()
    specs = parameters.slice_layers(transformer)
    names = _stored_names(file, transformer, blocks)
    if shard is None:
        origins = _fill(transformer, parameters, names, specs, device, progress)
    else:
        origins = _outline(transformer, parameters, names)
    transformer = _finished(transformer, file, parameters.compute)
    origin_of = {path: origins[parameter] for path, parameter in transformer.named_parameters()}
    shares = {} if shard is None else shard(transformer)
    held = []
    for path, own in origin_of.items():
        name, spec, (share, rows) = names[own], specs.get(own), shares.get(path, (None, None))
        original = None
        if share is not None:
            share.copy_(parameters.mapped(name, spec, rows))
            progress(len(held) / len(origin_of))
        elif device.type == "cpu":
            original = transformer.get_parameter(path).data
        held.append(HeldParameter(name, transformer, path, spec, rows, original))
    return transformer, held


def _fill(
    transformer: FluxTransformer2DModel,
    parameters: _Parameters,
    names: dict[str, str],
    specs: dict[str, TPShardSpec],
    device: torch.device,
    progress: Callable[[float], None],
) -> dict[nn.Parameter, str]:
    """Gives every parameter its value, on the CPU a view of the mapping wherever the dtype allows, and returns their
    names."""
    values = {}
    for own, name in names.items():
        mapped = parameters.mapped(name, specs.get(own))
        values[own] = mapped.to(device).to(parameters.dtype(own, mapped.dtype))
        progress(len(values) / len(names))
    transformer.load_state_dict(values, strict=True, assign=True)
    return {parameter: own for own, parameter in transformer.named_parameters()}


def _outline(
    transformer: FluxTransformer2DModel, parameters: _Parameters, names: dict[str, str]
) -> dict[nn.Parameter, str]:
    """Gives every parameter its dtype, still on the meta device, and returns their names: layers are replaced later."""
    outlines = {}
    for own, empty in transformer.state_dict().items():
        kept = parameters.dtype(own, parameters.mapped(names[own], None).dtype)
        outlines[own] = nn.Parameter(torch.empty_like(empty, dtype=kept), requires_grad=False)
    transformer.load_state_dict(outlines, strict=True, assign=True)
    return {parameter: own for own, parameter in transformer.named_parameters()}


def _finished(
    transformer: FluxTransformer2DModel, file: FluxFile, compute: torch.dtype
) -> FluxTransformer2DModel:
    """Replaces the layers that compute otherwise than diffusers' own."""
    if file.layout == "original" and not isinstance(transformer.norm_out, _Unchanged):
        transformer.norm_out.linear = HalvesSwapped(transformer.norm_out.linear)
    cast_on_use(transformer, compute)
    transformer.time_text_embed = _ExactTimestep(transformer.time_text_embed)
    transformer.last_text = _LastText()
    transformer.transformer_blocks = BlockList(transformer.transformer_blocks)
    transformer.single_transformer_blocks = BlockList(transformer.single_transformer_blocks)
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
