"""Loading Flux.1: a checked file to diffusers' transformers over the mapped file, whole or the part of one rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from operator import methodcaller

import torch
from diffusers.hooks.tensor_parallel import TPShardSpec
from diffusers.models.modeling_utils import no_init_weights
from diffusers.models.transformers.transformer_flux import FluxTransformer2DModel
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from ...errors import CheckpointError, RequestError
from ...layout import split_blocks
from ...requests import FP8_FAST, WEIGHT_DTYPES, ModelSpec
from ...wire.heartbeat import heartbeat
from ..base import ModelPart, Slices, TokenModel, WeightSharding
from ..block_list import BlockList
from ..cards import halves_of, multiply_fp8
from ..dtypes import FP8, HALVES, Dtypes
from ..staging import staged_reader
from .casting import HalvesSwapped, cast_on_use
from .checkpoint import AXES_DIMS, FluxFile, inspect_flux
from .compat_diffusers import patch_diffusers
from .keys import FluxDims, diffusers_sources
from .module import ExactTimestep, FluxModel
from .sending import send_early
from .tensor_parallel import slice_layers, take_slice
from .tensors import diffusers_part
from .weight_bytes import is_kept_in_compute_dtype
from .weights import FluxWeights, HeldParameter


class _Unchanged(nn.Module):
    """Stands where a chunk has no such layer: gives back its first argument."""

    def forward(self, hidden_states: Tensor, *rest: Tensor) -> Tensor:
        return hidden_states


def load(
    spec: ModelSpec,
    device: torch.device,
    part: ModelPart | None = None,
    peers: Sequence[torch.device] = (),
) -> TokenModel:
    """Loads `spec` for one rank: the whole model, or this rank's part of it, in a dtype that all `peers` compute in.

    On the CPU the parameters are views of the mapped file: no copy, but for shares that `part.sharding` has made. On an
    accelerator each tensor goes there by large reads of the file (models/staging.py). Raises CheckpointError for a file
    that is refused.
    """
    part = part or ModelPart()
    patch_diffusers()
    file = inspect_flux(spec.path)
    dtypes, as_stored = choose_dtypes(spec.weight_dtype, file.dtype, device, halves_of(peers or (device,)))
    compute = getattr(torch, dtypes.compute)
    opened = open_mapped(file)
    in_fp8 = spec.weight_dtype == FP8_FAST and multiply_fp8(peers or (device,))
    parameters = Parameters(file, opened, dtypes, as_stored, part.slices, in_fp8)
    dims = file.dims
    stage = split_blocks(dims.double_blocks, dims.single_blocks, part.stage_shares)[part.stage]
    chunks: list[FluxTransformer2DModel] = []
    held: list[HeldParameter] = []

    def progress(done: float) -> None:
        heartbeat.loading((len(chunks) + done) / len(stage))

    with staged_reader(file.path, opened, device) or nullcontext() as staged:
        to_device = staged.to_device if staged is not None else methodcaller("to", device)
        for blocks in stage:
            chunk, own = _build(parameters, blocks, device, part.sharding, to_device, progress)
            if chunks:  # the embedding of time and text is every chunk's: one copy will do
                chunk.time_text_embed = chunks[0].time_text_embed
                own = [parameter for parameter in own if not parameter.name.startswith("time_text_embed.")]
            chunks.append(chunk)
            held += own
    weights = FluxWeights(
        file, held, device, read=parameters.read, mapped=parameters.mapped, cut=parameters.cut
    )
    return FluxModel(tuple(chunks), stage, file, compute, device, weights, part.sharding)


def open_mapped(file: FluxFile) -> safe_open:
    """The mapped file; it stays open as long as the model, which reads it again when a LoRA goes."""
    try:
        return safe_open(file.path, framework="pt", device="cpu")
    except (SafetensorError, OSError):  # its header was sound a moment ago
        raise CheckpointError(
            f"{file.name} is refused: it changed while it was opened. Wait until it is written, and try again."
        ) from None


class Parameters:
    """Makes diffusers' parameters of rows of the file's tensors, and of this rank's slice of those."""

    def __init__(
        self,
        file: FluxFile,
        opened: safe_open,
        dtypes: Dtypes,
        as_stored: bool,
        slices: Slices | None,
        multiplied_in_fp8: bool,
    ) -> None:
        self.file = file
        self.multiplied_in_fp8 = multiplied_in_fp8
        self.compute: torch.dtype = getattr(torch, dtypes.compute)
        self._opened = opened
        self._dtypes = dtypes
        self._as_stored = as_stored
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
        if spec is None or self._slices is None:
            return tensor[rows]
        return take_slice(tensor, spec, self._slices, rows)

    def dtype(self, name: str, stored: torch.dtype) -> torch.dtype:
        """The dtype it is kept in. `stored`: its own in the file, where a few differ from most."""
        if is_kept_in_compute_dtype(name, self._dtypes):
            return self.compute
        return stored if self._as_stored else getattr(torch, self._dtypes.storage)


def _build(
    parameters: Parameters,
    blocks: range,
    device: torch.device,
    sharding: WeightSharding | None,
    to_device: Callable[[Tensor], Tensor],
    progress: Callable[[float], None],
) -> tuple[FluxTransformer2DModel, list[HeldParameter]]:
    """A transformer of the blocks `blocks` (doubles first), with embedders and last layer where they belong, and what
    its parameters are in the whole model."""
    file = parameters.file
    with torch.device("meta"), no_init_weights():
        transformer = FluxTransformer2DModel(**transformer_config(file.dims, blocks))
    if blocks.start > 0:
        transformer.x_embedder = transformer.context_embedder = _Unchanged()
    if blocks.stop < file.dims.double_blocks + file.dims.single_blocks:
        transformer.norm_out = transformer.proj_out = _Unchanged()
    specs = parameters.slice_layers(transformer)
    names = _stored_names(file, transformer, blocks)
    if sharding is None:
        origins = _fill(transformer, parameters, names, specs, to_device, progress)
    else:
        origins = _outline(transformer, parameters, names)
    transformer = _finished(transformer, parameters)
    origin_of = {path: origins[parameter] for path, parameter in transformer.named_parameters()}
    blocks_of = [*transformer.transformer_blocks, *transformer.single_transformer_blocks]
    shares = {} if sharding is None else sharding.shard(transformer, blocks_of)
    held: list[HeldParameter] = []
    for path, own in origin_of.items():
        name, spec = names[own], specs.get(own)
        original, rows = None, None
        if path in shares:
            share, rows = shares[path]
            share.copy_(to_device(parameters.mapped(name, spec, rows)))
            progress(len(held) / len(origin_of))
        elif device.type == "cpu":
            original = transformer.get_parameter(path).data
        held.append(HeldParameter(name, transformer, path, spec, rows, original))
    return transformer, held


def _fill(
    transformer: FluxTransformer2DModel,
    parameters: Parameters,
    names: dict[str, str],
    specs: dict[str, TPShardSpec],
    to_device: Callable[[Tensor], Tensor],
    progress: Callable[[float], None],
) -> dict[nn.Parameter, str]:
    """Gives every parameter its value, on the CPU a view of the mapping wherever the dtype allows, and returns their
    names."""
    values = {}
    for own, name in names.items():
        mapped = parameters.mapped(name, specs.get(own))
        values[own] = to_device(mapped).to(parameters.dtype(own, mapped.dtype))
        progress(len(values) / len(names))
    transformer.load_state_dict(values, strict=True, assign=True)
    return {parameter: own for own, parameter in transformer.named_parameters()}


def _outline(
    transformer: FluxTransformer2DModel, parameters: Parameters, names: dict[str, str]
) -> dict[nn.Parameter, str]:
    """Gives every parameter its dtype, still on the meta device, and returns their names: layers are replaced later."""
    outlines = {}
    for own, empty in transformer.state_dict().items():
        kept = parameters.dtype(own, parameters.mapped(names[own], None).dtype)
        outlines[own] = nn.Parameter(torch.empty_like(empty, dtype=kept), requires_grad=False)
    transformer.load_state_dict(outlines, strict=True, assign=True)
    return {parameter: own for own, parameter in transformer.named_parameters()}


def _finished(transformer: FluxTransformer2DModel, parameters: Parameters) -> FluxTransformer2DModel:
    """Replaces the layers that compute otherwise than diffusers' own."""
    if parameters.file.layout == "original" and not isinstance(transformer.norm_out, _Unchanged):
        transformer.norm_out.linear = HalvesSwapped(transformer.norm_out.linear)
    cast_on_use(transformer, parameters.compute, in_fp8=parameters.multiplied_in_fp8)
    send_early(transformer)
    transformer.time_text_embed = ExactTimestep(transformer.time_text_embed)
    transformer.transformer_blocks = BlockList(transformer.transformer_blocks)
    transformer.single_transformer_blocks = BlockList(transformer.single_transformer_blocks)
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


def transformer_config(dims: FluxDims, blocks: range) -> dict[str, object]:
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


def choose_dtypes(
    wish: str, file_dtype: str, device: torch.device, halves: Sequence[str] = HALVES
) -> tuple[Dtypes, bool]:
    """(dtypes, whether layers stay as the file has them). Raises RequestError for a wish that is none."""
    if wish not in WEIGHT_DTYPES:
        raise RequestError(f"weight_dtype {wish!r} is unknown; choose one of {', '.join(WEIGHT_DTYPES)}.")
    on_cpu = device.type == "cpu"
    dtypes = Dtypes.of(wish, file_dtype, on_cpu, halves)
    # A dtype that was asked for is every layer's on an accelerator, also of those few that the file keeps otherwise.
    return dtypes, dtypes.storage == file_dtype and (on_cpu or wish in ("auto", FP8, FP8_FAST))
