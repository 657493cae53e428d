"""Loads a Flux.1 file into diffusers' transformer, completely or a rank's part of it, as a ModuleModel for the engine.

Every rank builds the module with all blocks; parameters of blocks that other stages compute are empty placeholders. On
the CPU the parameters are views of the mapped file.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import ClassVar

import torch
from diffusers.models.modeling_utils import no_init_weights
from diffusers.models.transformers.transformer_flux import FluxTransformer2DModel
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from ...errors import CheckpointError, RequestError
from ...requests import FP8_FAST, WEIGHT_DTYPES, ModelSpec
from ...wire.heartbeat import heartbeat
from ..base import ModelPart, Rotate, WeightChunks, WeightSharding
from ..comfyui.formats.slices import slice_blocks
from ..comfyui.placing import absent_parameters, place
from ..dtypes import FP8, HALVES, Dtypes, halves_of_card
from ..staging import staged_reader
from ..tokens.block_kinds import DIFFUSERS_FLUX
from ..tokens.regions import Region
from .adapter import DiffusersFlux
from .casting import CastingLinear, HalvesSwapped, cast_on_use
from .checkpoint import AXES_DIMS, FluxFile, inspect_flux
from .compat_diffusers import patch_diffusers, rotary_by
from .keys import FluxDims, diffusers_sources
from .memory import device_dtype, stays_in_compute_dtype


@dataclass(eq=False)
class DiffusersModel(WeightChunks):
    """A base.ModuleModel. `bytes`, `stored_dtype`: of the tensors in the file."""

    module: DiffusersFlux
    device: torch.device
    bytes: int
    stored_dtype: str
    compute_dtype: torch.dtype
    byte_sharding: WeightSharding | None = None

    attention: ClassVar[str] = "pytorch"
    splits_layers: ClassVar[bool] = True
    inseparable_rows: ClassVar[bool] = False
    scales_by_largest: ClassVar[bool] = False
    regions: ClassVar[tuple[Region, ...]] = (DIFFUSERS_FLUX,)

    def leave_device(self) -> None:
        pass

    def come_back(self) -> None:
        pass

    def attention_is_replaced(self) -> bool:
        return False

    def begin_call(self) -> None:
        pass

    def rotary_by(self, rotate: Rotate) -> AbstractContextManager[None]:
        return rotary_by(rotate)

    def gives_rows(self, layer: nn.Module) -> bool:
        return type(layer) in (nn.Linear, CastingLinear)  # Fp8Linear needs sides that are multiples of 16

    def weight_rows(self, weight: Tensor, rows: slice) -> Tensor:
        return weight[rows]

    def multiplies(self, layer: nn.Module, x: Tensor) -> bool:
        return type(layer) is nn.Linear and layer.weight.dtype == x.dtype


def load(
    spec: ModelSpec,
    device: torch.device,
    part: ModelPart | None = None,
    peers: Sequence[torch.device] = (),
) -> DiffusersModel:
    """Loads `spec` for one rank, in a dtype that all `peers` compute in. Raises CheckpointError for a refused file and
    RequestError for a refused request."""
    part = part or ModelPart()
    patch_diffusers(device.type)
    file = inspect_flux(spec.path)
    dtypes, as_stored = choose_dtypes(spec.weight_dtype, file.dtype, device, halves_of(peers or (device,)))
    compute = getattr(torch, dtypes.compute)
    opened = open_mapped(file)
    in_fp8 = spec.weight_dtype == FP8_FAST and multiply_fp8(peers or (device,))
    with torch.device("meta"), no_init_weights():
        transformer = FluxTransformer2DModel(**transformer_config(file.dims))
    transformer.load_state_dict(mapped_parameters(file, opened), strict=True, assign=True)
    names = {parameter: name for name, parameter in transformer.named_parameters()}
    if file.layout == "original":
        transformer.norm_out.linear = HalvesSwapped(transformer.norm_out.linear)
    kept: dict[Tensor, torch.dtype] = {
        p: loaded_dtype(n, p.dtype, dtypes, as_stored) for p, n in names.items()
    }
    cast_on_use(transformer, compute, kept.__getitem__, in_fp8=in_fp8)
    module = DiffusersFlux(transformer, compute).requires_grad_(False).eval()
    dtypes_by_path = {path: kept[parameter] for path, parameter in module.named_parameters()}
    if part.slices is not None:
        slice_blocks(module, [DIFFUSERS_FLUX], part.slices)
    absent = absent_parameters(module, part)
    heartbeat.loading(0.0)
    with staged_reader(file.path, opened, device) as staged:
        holder = nn.ModuleDict({"diffusion_model": module})
        place(holder, device, dtypes_by_path, part.byte_sharding, absent, staged)
    module.requires_grad_(False)
    return DiffusersModel(module, device, file.tensor_bytes, file.dtype, compute, part.byte_sharding)


def open_mapped(file: FluxFile) -> safe_open:
    """Opens the mapped file. The mapping lives as long as the model has views of it. Raises CheckpointError."""
    try:
        return safe_open(file.path, framework="pt", device="cpu")
    except (SafetensorError, OSError):  # its header was valid a moment ago
        raise CheckpointError(
            f"{file.name} is refused: it changed while it was opened. Wait until it is written, and try again."
        ) from None


def mapped_parameters(file: FluxFile, opened: safe_open) -> dict[str, Tensor]:
    """Returns diffusers' parameters as views of the mapping, by name: rows of the file's tensors."""
    sources = diffusers_sources(file.dims)
    if file.layout == "diffusers":
        return {name: opened.get_tensor(file.stored_key(name)) for name in sources}
    return {name: opened.get_tensor(file.stored_key(key))[rows] for name, (key, rows) in sources.items()}


def loaded_dtype(name: str, stored: torch.dtype, dtypes: Dtypes, as_stored: bool) -> torch.dtype:
    """Returns the dtype that a parameter is loaded in. `stored`: its dtype in the file; a few differ from the others;
    `as_stored`: see choose_dtypes."""
    if as_stored and not stays_in_compute_dtype(name, dtypes):
        return stored
    return getattr(torch, device_dtype(name, dtypes))


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
    """Returns (dtypes, True if layers keep their dtype in the file). Raises RequestError for an unknown `wish`."""
    if wish not in WEIGHT_DTYPES:
        raise RequestError(f"weight_dtype {wish!r} is unknown; choose one of {', '.join(WEIGHT_DTYPES)}.")
    on_cpu = device.type == "cpu"
    dtypes = Dtypes.of(wish, file_dtype, on_cpu, halves)
    # On an accelerator, a requested dtype holds for every layer, also for the few that have another one in the file.
    return dtypes, dtypes.storage == file_dtype and (on_cpu or wish in ("auto", FP8, FP8_FAST))


def halves_of(devices: Sequence[torch.device]) -> tuple[str, ...]:
    """Returns the 16-bit dtypes that all GPUs among `devices` compute in, the preferred one first."""
    found = [_halves(device) for device in devices if device.type == "cuda"]
    return tuple(half for half in HALVES if all(half in halves for halves in found))


def multiply_fp8(devices: Sequence[torch.device]) -> bool:
    """Returns True if all devices multiply fp8 in hardware (ComfyUI's supports_fp8_compute)."""
    if torch.version.hip is not None:
        return False
    return all(d.type == "cuda" and torch.cuda.get_device_capability(d) >= (8, 9) for d in devices)


def _halves(device: torch.device) -> tuple[str, ...]:
    card = torch.cuda.get_device_properties(device)
    amd = card.gcnArchName if torch.version.hip is not None else None
    return halves_of_card((card.major, card.minor), card.name, amd)
