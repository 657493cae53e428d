"""ComfyUI's classes and names of Flux.1, for its loader node alone; all else here knows a model's file."""

from __future__ import annotations

from collections.abc import Mapping

import comfy.ldm.flux.layers
import comfy.model_base
import comfy.model_patcher
import comfy.ops
import comfy.supported_models
import torch
from safetensors import safe_open
from torch import Tensor

from ...parallel_backend.models.diffusers.checkpoint import FluxFile
from ...parallel_backend.models.diffusers.tensors import original_tensor
from ...parallel_backend.options import ComputeOptions
from ...parallel_backend.planner.rules import StrategySettings
from ...parallel_backend.requests import ModelSpec
from .network import StepwiseNetwork
from .patcher import parallel_patcher

_NORM_ENDING = next(
    name.removeprefix("query_norm.")
    for name in comfy.ldm.flux.layers.QKNorm(
        1, device="meta", operations=comfy.ops.disable_weight_init
    ).state_dict()
    if name.startswith("query_norm.")
)

_FILL_CHANNELS = 384  # of an image token: latent, image and mask


class FluxParameters:
    """The parameters of a Flux file by the names of the original layout, whatever the file's own."""

    def __init__(self, file: FluxFile) -> None:
        self._file = file

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._file.original_shapes

    def key_of(self, name: str) -> str:
        """`….query_norm.weight` (as ComfyUI has it now) -> `….query_norm.scale`."""
        return name.removesuffix(".weight") + ".scale" if name.endswith("_norm.weight") else name

    def read(self, key: str) -> Tensor:
        with safe_open(self._file.path, framework="pt", device="cpu") as opened:
            return original_tensor(self._file, opened.get_tensor, key)


def make_flux_model(
    spec: ModelSpec, file: FluxFile, settings: StrategySettings, computing: ComputeOptions
) -> comfy.model_patcher.ModelPatcher:
    """The MODEL of `spec` for ComfyUI's loop. Starts nothing."""
    return parallel_patcher(_base_model(file), _network(spec, file), settings, computing)


def _base_model(file: FluxFile) -> comfy.model_base.BaseModel:
    """ComfyUI's, without a network."""
    config = _family(file)(
        {
            "image_model": "flux",
            "guidance_embed": file.dims.guidance,
            "in_channels": file.dims.in_channels // 4,
            "out_channels": file.dims.out_channels // 4,
            "depth": file.dims.double_blocks,
            "depth_single_blocks": file.dims.single_blocks,
            "hidden_size": file.dims.hidden,
            "disable_unet_model_creation": True,
        }
    )
    # The ranks round to the compute dtype; rounding here as well would lose the exact timestep.
    config.set_inference_dtype(torch.float32, None)
    return config.get_model({}, "")


def _network(spec: ModelSpec, file: FluxFile) -> StepwiseNetwork:
    parameters = FluxParameters(file)
    shapes = {_comfyui_key(key): shape for key, shape in parameters.shapes.items()}
    network = StepwiseNetwork(spec, file, parameters, shapes)
    # What nodes read of ComfyUI's own class.
    network.patch_size = 2
    network.in_channels, network.out_channels = file.dims.in_channels, file.dims.out_channels
    network.hidden_size, network.num_heads = file.dims.hidden, file.dims.heads
    return network


def _comfyui_key(key: str) -> str:
    """The original name of a parameter as this ComfyUI has it: it came to call the scale of a norm its weight."""
    return key.removesuffix("scale") + _NORM_ENDING if key.endswith("_norm.scale") else key


def _family(file: FluxFile) -> type[comfy.supported_models.Flux]:
    """ComfyUI's description of it; Fill is one of its own, Canny and Depth are dev with more input channels."""
    if file.dims.in_channels == _FILL_CHANNELS:
        return comfy.supported_models.FluxInpaint
    return comfy.supported_models.Flux if file.dims.guidance else comfy.supported_models.FluxSchnell
