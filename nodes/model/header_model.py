"""A MODEL from its file's header: ComfyUI's own detection and dtypes over the mapped file, without reading weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

import comfy.model_base
import comfy.model_detection
import comfy.model_management
import comfy.model_patcher
import comfy.supported_models_base
import comfy.utils
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ...parallel_backend.errors import CheckpointError, RequestError
from ...parallel_backend.models.checkpoint import read_header
from ...parallel_backend.models.comfyui.formats.gguf import outline
from ...parallel_backend.models.comfyui.formats.key_layouts import without_prefix
from ...parallel_backend.models.comfyui.load import map_tensors, unknown_model
from ...parallel_backend.models.gguf_file import is_gguf
from ...parallel_backend.requests import ModelSpec
from .file_weight import mark_weights

T = TypeVar("T")

META = torch.device("meta")
# Functions that make tensors of given values. Parameters are made by others (torch.empty and its like).
_OF_VALUES = {torch.tensor, torch.as_tensor, torch.arange, torch.linspace, torch.logspace}
_LAYER_FORMAT = ".comfy_quant"  # a layer's quantisation as JSON, not a weight
# Endings of the names of tensors that belong to a quantised weight.
_SCALES = (_LAYER_FORMAT, "scaled_fp8", "weight_scale", "scale_weight", "input_scale", "scale_input")


def open_model(spec: ModelSpec) -> comfy.model_patcher.ModelPatcher:
    """Returns the MODEL that ComfyUI would load, with parameters on the meta device. Raises CheckpointError for a file
    that is damaged or that ComfyUI does not know, and RequestError for one that it would rewrite."""
    path, part = spec.path, spec.comfyui.part
    tensors, metadata = _mapped(path)
    if part == "diffusion_model":
        tensors = without_prefix(tensors, metadata)
    prefix = comfy.model_detection.unet_prefix_from_state_dict(tensors)
    tensors, metadata = comfy.utils.convert_old_quants(tensors, prefix, metadata=metadata)
    if part == "diffusion_model":  # which may be a checkpoint as well
        unprefixed = comfy.utils.state_dict_prefix_replace(dict(tensors), {prefix: ""}, filter_keys=True)
        tensors, prefix = unprefixed or tensors, ""
        tensors, metadata = comfy.utils.convert_old_quants(tensors, prefix, metadata=metadata)
    config = comfy.model_detection.model_config_from_unet(tensors, prefix, metadata=metadata)
    if config is None and part == "diffusion_model" and (converted := _from_diffusers(path, tensors)):
        tensors = converted
        config = comfy.model_detection.model_config_from_unet(tensors, prefix)
    if config is None:
        raise _unknown(path, tensors)
    _choose_dtypes(config, tensors, prefix, spec)
    model = build_on_meta(lambda device: config.get_model(tensors, prefix, device=device))
    if config.quant_config is not None:  # its layers create their parameters as they load them
        outlines = {
            name: value if name.endswith(_LAYER_FORMAT) else value.to(META) for name, value in tensors.items()
        }
        model.load_model_weights(outlines, prefix)
    _make_parameters(model.diffusion_model)
    mark_weights(model.diffusion_model)
    return comfy.model_patcher.ModelPatcher(
        model, comfy.model_management.get_torch_device(), comfy.model_management.unet_offload_device()
    )


def _mapped(path: str) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Returns (tensors, metadata) of a file; packed tensors of a GGUF file are empty, on the meta device."""
    if is_gguf(path):
        return outline(path), {}
    read_header(path)  # its errors name the file and the remedy; safe_open's do not
    return map_tensors(path)[1:]


def _from_diffusers(path: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns a transformer's tensors from diffusers' layout by ComfyUI's names, on the meta device; empty for other
    files. Raises CheckpointError for scaled weights: ComfyUI drops their scales."""
    outlines = {name: tensor.to(META) for name, tensor in tensors.items()}
    converted: dict[str, Tensor] = comfy.model_detection.convert_diffusers_mmdit(outlines, "") or {}
    scaled = next((name for name in tensors if name.endswith(_SCALES)), None)
    if converted and scaled is not None:
        raise CheckpointError(
            f"{Path(path).name} is refused: it stores scaled weights ({scaled[:100]!r}) in diffusers' key layout, for "
            f"which ComfyUI has no scales. Use a plain fp8 or bf16 file, or one in the original key layout."
        )
    return converted


def _choose_dtypes(
    config: comfy.supported_models_base.BASE, tensors: dict[str, Tensor], prefix: str, spec: ModelSpec
) -> None:
    """Chooses the dtypes as comfy.sd's loaders do."""
    device = comfy.model_management.get_torch_device()
    supported = list(config.supported_inference_dtypes)
    quantised = config.quant_config is not None
    if spec.weight_dtype != "auto":
        dtype = getattr(torch, spec.weight_dtype)
    else:
        dtype = comfy.model_management.unet_dtype(
            model_params=comfy.utils.calculate_parameters(tensors, prefix),
            supported_dtypes=supported,
            weight_dtype=None if quantised else comfy.utils.weight_dtype(tensors, prefix),
        )
    cast = comfy.model_management.unet_manual_cast(None if quantised else dtype, device, supported)
    config.set_inference_dtype(dtype, cast, device=device)
    if spec.comfyui.fp8_matmul:
        config.optimizations["fp8"] = True


def _make_parameters(module: nn.Module) -> None:
    """Creates missing parameters: with dynamic VRAM ComfyUI builds linear layers without, until a file is loaded."""
    for layer in module.modules():
        if isinstance(layer, nn.Linear) and layer.weight is None:
            layer.weight = _parameter(layer.weight_comfy_model_dtype, layer.out_features, layer.in_features)
            if layer.comfy_need_lazy_init_bias:
                layer.bias = _parameter(layer.bias_comfy_model_dtype, layer.out_features)


def _parameter(dtype: torch.dtype | None, *shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, dtype=dtype, device=META), requires_grad=False)


def _unknown(path: str, tensors: dict[str, Tensor]) -> CheckpointError | RequestError:
    name = Path(path).name
    if any(key.startswith("down_blocks.") for key in tensors):
        return RequestError(
            f"{name} is in diffusers' layout, whose weights ComfyUI rewrites as it loads them. Load it with Load "
            f"Diffusion Model and put Parallel Model behind that."
        )
    return unknown_model(name)


class _ValuesOnHost(TorchFunctionMode):
    """A mode in which tensors of given values are made on the CPU instead of the meta device."""

    def __torch_function__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        given = dict(kwargs or {})
        device = given.get("device")
        if func in _OF_VALUES and device is not None and torch.device(device).type == "meta":
            given["device"] = "cpu"
        return func(*args, **given)


def build_on_meta(build: Callable[[torch.device], T]) -> T:
    """Calls `build` with the meta device. If a class computes with values while it is built, such as ACE-Step 1.5's
    codebook, this fails: then calls `build` again with these values on the CPU."""
    try:
        return build(META)
    except (RuntimeError, NotImplementedError):
        with _ValuesOnHost():
            return build(META)
