"""Loading Flux.1 for diffusers' module: a checked file to the adapter over the mapped file, all of it or a rank's part.

Every rank has the module with all of its blocks; for the parameters of those that other stages compute there are empty
ones. On the CPU the parameters are views of the mapped file.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

import torch
from diffusers.models.modeling_utils import no_init_weights
from diffusers.models.transformers.transformer_flux import FluxTransformer2DModel
from torch import nn

from ...layout import stage_blocks
from ...requests import FP8_FAST, ModelSpec
from ...wire.heartbeat import heartbeat
from ..base import ModelPart
from ..cards import halves_of, multiply_fp8
from ..comfyui.placing import place
from ..staging import staged_reader
from ..tokens.table import stage_lists
from .adapter import DiffusersFlux
from .casting import HalvesSwapped, cast_on_use
from .checkpoint import inspect_flux
from .compat_diffusers import patch_diffusers
from .load import Parameters, choose_dtypes, open_mapped, transformer_config
from .model import DiffusersModel
from .module import ExactTimestep
from .weights import FluxWeights, HeldParameter


def load(
    spec: ModelSpec,
    device: torch.device,
    part: ModelPart | None = None,
    peers: Sequence[torch.device] = (),
) -> DiffusersModel:
    """Loads `spec` for one rank, in a dtype that all `peers` compute in. Raises CheckpointError for a refused file."""
    part = part or ModelPart()
    patch_diffusers()
    file = inspect_flux(spec.path)
    dtypes, as_stored = choose_dtypes(spec.weight_dtype, file.dtype, device, halves_of(peers or (device,)))
    compute = getattr(torch, dtypes.compute)
    opened = open_mapped(file)
    in_fp8 = spec.weight_dtype == FP8_FAST and multiply_fp8(peers or (device,))
    parameters = Parameters(file, opened, dtypes, as_stored, part.slices, in_fp8)
    with torch.device("meta"), no_init_weights():
        blocks = range(file.dims.double_blocks + file.dims.single_blocks)
        transformer = FluxTransformer2DModel(**transformer_config(file.dims, blocks))
    specs = parameters.slice_layers(transformer)
    mapped = {name: parameters.mapped(name, specs.get(name)) for name in transformer.state_dict()}
    transformer.load_state_dict(mapped, strict=True, assign=True)
    names = {parameter: name for name, parameter in transformer.named_parameters()}
    if file.layout == "original":
        transformer.norm_out.linear = HalvesSwapped(transformer.norm_out.linear)
    cast_on_use(transformer, compute, in_fp8=in_fp8)
    transformer.time_text_embed = ExactTimestep(transformer.time_text_embed)
    module = DiffusersFlux(transformer.requires_grad_(False).eval(), compute)
    name_of = {path: names[parameter] for path, parameter in module.named_parameters()}
    kept = {path: parameters.dtype(name, mapped[name].dtype) for path, name in name_of.items()}
    absent = _absent(module, part)
    heartbeat.loading(0.0)
    with staged_reader(file.path, opened, device) or nullcontext() as staged:
        holder = nn.ModuleDict({"diffusion_model": module})
        place(holder, device, kept, part.byte_sharding, absent, staged)
    module.requires_grad_(False)
    here = {} if part.byte_sharding is not None else {p: n for p, n in name_of.items() if p not in absent}
    on_cpu = device.type == "cpu"
    held = [
        HeldParameter(
            name, module, path, specs.get(name), None, module.get_parameter(path).data if on_cpu else None
        )
        for path, name in here.items()
    ]
    weights = FluxWeights(
        file, held, device, read=parameters.read, mapped=parameters.mapped, cut=parameters.cut
    )
    return DiffusersModel(module, device, file.tensor_bytes, file.dtype, compute, weights, part.byte_sharding)


def _absent(module: nn.Module, part: ModelPart) -> set[str]:
    """Parameters that only blocks of other stages of a pipeline have."""
    lists = stage_lists(type(module).__name__)
    blocks = [
        f"{path}.{n}." for path in lists for n in range(len(list(module.get_submodule(path).children())))
    ]
    own = stage_blocks(len(blocks), part.stage_shares)[part.stage]
    elsewhere = tuple(path for number, path in enumerate(blocks) if number not in own)
    return {path for path, _ in module.named_parameters() if elsewhere and path.startswith(elsewhere)}
