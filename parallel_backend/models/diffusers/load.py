"""Loads Flux.1 for diffusers' module: a checked file to the adapter over the mapped file, all of it or a rank's part.

Every rank has the module with all of its blocks; for the parameters of those that other stages compute there are empty
ones. On the CPU the parameters are views of the mapped file.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

import torch
from diffusers.models.modeling_utils import no_init_weights
from diffusers.models.transformers.transformer_flux import FluxTransformer2DModel
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from ...errors import CheckpointError, RequestError
from ...layout import stage_blocks
from ...requests import FP8_FAST, WEIGHT_DTYPES, ModelSpec
from ...wire.heartbeat import heartbeat
from ..base import ModelPart
from ..comfyui.formats.slices import slice_blocks
from ..comfyui.placing import place
from ..dtypes import FP8, HALVES, Dtypes, halves_of_card
from ..staging import staged_reader
from ..tokens.block_kinds import DIFFUSERS_FLUX
from ..tokens.table import stage_lists
from .adapter import DiffusersFlux
from .casting import HalvesSwapped, cast_on_use
from .checkpoint import AXES_DIMS, FluxFile, inspect_flux
from .compat_diffusers import patch_diffusers
from .exact_timestep import ExactTimestep
from .keys import FluxDims, diffusers_sources
from .memory.weight_bytes import is_kept_in_compute_dtype
from .model import DiffusersModel


def load(
    spec: ModelSpec,
    device: torch.device,
    part: ModelPart | None = None,
    peers: Sequence[torch.device] = (),
) -> DiffusersModel:
    """Loads `spec` for one rank, in a dtype that all `peers` compute in. Raises CheckpointError for a refused file."""
    part = part or ModelPart()
    patch_diffusers(device.type)
    file = inspect_flux(spec.path)
    dtypes, as_stored = choose_dtypes(spec.weight_dtype, file.dtype, device, halves_of(peers or (device,)))
    compute = getattr(torch, dtypes.compute)
    opened = open_mapped(file)
    in_fp8 = spec.weight_dtype == FP8_FAST and multiply_fp8(peers or (device,))
    parameters = Parameters(file, opened, dtypes, as_stored)
    with torch.device("meta"), no_init_weights():
        transformer = FluxTransformer2DModel(**transformer_config(file.dims))
    mapped = {name: parameters.mapped(name) for name in transformer.state_dict()}
    transformer.load_state_dict(mapped, strict=True, assign=True)
    names = {parameter: name for name, parameter in transformer.named_parameters()}
    if file.layout == "original":
        transformer.norm_out.linear = HalvesSwapped(transformer.norm_out.linear)
    kept: dict[Tensor, torch.dtype] = {p: parameters.dtype(name, p.dtype) for p, name in names.items()}
    cast_on_use(transformer, compute, kept.__getitem__, in_fp8=in_fp8)
    transformer.time_text_embed = ExactTimestep(transformer.time_text_embed)
    module = DiffusersFlux(transformer.requires_grad_(False).eval(), compute)
    dtypes_by_path = {path: kept[parameter] for path, parameter in module.named_parameters()}
    if part.slices is not None:
        slice_blocks(module, [DIFFUSERS_FLUX], part.slices)
    absent = _absent(module, part)
    heartbeat.loading(0.0)
    with staged_reader(file.path, opened, device) or nullcontext() as staged:
        holder = nn.ModuleDict({"diffusion_model": module})
        place(holder, device, dtypes_by_path, part.byte_sharding, absent, staged)
    module.requires_grad_(False)
    return DiffusersModel(module, device, file.tensor_bytes, file.dtype, compute, part.byte_sharding)


def open_mapped(file: FluxFile) -> safe_open:
    """The mapped file, which stays open as long as the model has views of it."""
    try:
        return safe_open(file.path, framework="pt", device="cpu")
    except (SafetensorError, OSError):  # its header was sound a moment ago
        raise CheckpointError(
            f"{file.name} is refused: it changed while it was opened. Wait until it is written, and try again."
        ) from None


class Parameters:
    """Makes diffusers' parameters of rows of the file's tensors."""

    def __init__(self, file: FluxFile, opened: safe_open, dtypes: Dtypes, as_stored: bool) -> None:
        self._file = file
        self._opened = opened
        self._dtypes = dtypes
        self._as_stored = as_stored
        self._sources = diffusers_sources(file.dims)

    def mapped(self, name: str) -> Tensor:
        """Returns the parameter as the file has it: a view of the mapping."""
        file = self._file
        if file.layout == "diffusers":
            return self._opened.get_tensor(file.stored_key(name))
        source = self._sources[name]
        return self._opened.get_tensor(file.stored_key(source.key))[source.start : source.stop]

    def dtype(self, name: str, stored: torch.dtype) -> torch.dtype:
        """The dtype it is kept in. `stored`: its own in the file, where a few differ from most."""
        if is_kept_in_compute_dtype(name, self._dtypes):
            return getattr(torch, self._dtypes.compute)
        return stored if self._as_stored else getattr(torch, self._dtypes.storage)


def transformer_config(dims: FluxDims) -> dict[str, object]:
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


def _absent(module: nn.Module, part: ModelPart) -> set[str]:
    """Parameters that only blocks of other stages of a pipeline have."""
    lists = stage_lists(type(module).__name__)
    blocks = [
        f"{path}.{n}." for path in lists for n in range(len(list(module.get_submodule(path).children())))
    ]
    own = stage_blocks(len(blocks), part.stage_shares)[part.stage]
    elsewhere = tuple(path for number, path in enumerate(blocks) if number not in own)
    return {path for path, _ in module.named_parameters() if elsewhere and path.startswith(elsewhere)}


def halves_of(devices: Sequence[torch.device]) -> tuple[str, ...]:
    """The 16-bit dtypes that all of the GPUs among these compute in, the preferred one first."""
    found = [_halves(device) for device in devices if device.type == "cuda"]
    return tuple(half for half in HALVES if all(half in halves for halves in found))


def multiply_fp8(devices: Sequence[torch.device]) -> bool:
    """True if all of these multiply fp8 in hardware (ComfyUI's supports_fp8_compute)."""
    if torch.version.hip is not None:
        return False
    return all(d.type == "cuda" and torch.cuda.get_device_capability(d) >= (8, 9) for d in devices)


def _halves(device: torch.device) -> tuple[str, ...]:
    card = torch.cuda.get_device_properties(device)
    amd = card.gcnArchName if torch.version.hip is not None else None
    return halves_of_card((card.major, card.minor), card.name, amd)
