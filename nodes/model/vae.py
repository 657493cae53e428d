"""The weights of a ComfyUI VAE for the ranks; every VAE they cannot take is refused with the reason in words."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable

import comfy.sd
import torch
from comfy.ldm.models.autoencoder import AutoencoderKL, AutoencodingEngine
from comfy.ldm.modules.diffusionmodules.model import Decoder
from torch import Tensor, nn

from ...parallel_backend.errors import RequestError
from ...parallel_backend.models.vae.keys import decoder_keys, read_dims
from ...parallel_backend.models.vae.networks import (
    encodes_in_bands,
    is_for_decoding,
    is_for_encoding,
    splits_into_bands,
)
from ...parallel_backend.requests import ComfyUISource
from ...parallel_backend.wire.decode_messages import VaeWeights
from ..host.comfyui_flags import comfyui_root, numeric_flags

# Methods that some node packs replace on single layers or on a whole VAE, such as those for seamless tiles.
_METHODS = ("forward", "_conv_forward", "decode", "encode")
_CHANGED = "another node has changed how it computes"
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")

_numbers = itertools.count(1)
_numbered: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()


def weights_of(vae: comfy.sd.VAE) -> VaeWeights:
    """The VAE's decoder as the ranks take it. Raises RequestError with the reason why they cannot."""
    network = vae.first_stage_model
    _check(vae, splits_into_bands(network), "decode", _name_of(network, "decoder"))
    if getattr(network.decoder, "tanh_out", False):
        raise RequestError(_CHANGED)
    state = network.state_dict()
    comfyui: ComfyUISource | None = None
    if _is_plain_image_vae(network):
        read_dims({name: tuple(tensor.shape) for name, tensor in state.items()})
        state = {name: state[name] for name in decoder_keys(state)}
    else:
        state = {name: tensor for name, tensor in state.items() if is_for_decoding(name)}
        comfyui = ComfyUISource(root=comfyui_root(), flags=numeric_flags())
    return _weights(vae, state, comfyui, encodes=False)


def encoder_of(vae: comfy.sd.VAE) -> VaeWeights:
    """Its encoder, likewise; ComfyUI's own network for every kind."""
    network = vae.first_stage_model
    _check(vae, encodes_in_bands(network), "encode", _name_of(network, "encoder"))
    state = {name: tensor for name, tensor in network.state_dict().items() if is_for_encoding(name)}
    return _weights(vae, state, ComfyUISource(root=comfyui_root(), flags=numeric_flags()), encodes=True)


def _check(vae: comfy.sd.VAE, splits: bool, method: str, name: str) -> None:
    """Raises RequestError for a network that is not split, or no longer computes as its class does."""
    if not splits:
        raise RequestError(f"its network is {name}, which the devices do not know how to share out exactly")
    own = getattr(type(vae), method) is getattr(comfy.sd.VAE, method) and method not in vars(vae)
    if not own or _is_changed(vae.first_stage_model):
        raise RequestError(_CHANGED)
    if vae.patcher.patches or vae.patcher.object_patches:
        raise RequestError("another node has patched it")


def _weights(
    vae: comfy.sd.VAE, state: dict[str, Tensor], comfyui: ComfyUISource | None, *, encodes: bool
) -> VaeWeights:
    def as_computed() -> dict[str, Tensor]:
        return {name: tensor.to("cpu", _dtype_of(tensor, vae)) for name, tensor in state.items()}

    identity = f"{_number(vae.first_stage_model)} {_digest(state.values())} {vae.vae_dtype}"
    return VaeWeights(identity, as_computed, comfyui, encodes)


def _is_plain_image_vae(network: nn.Module) -> bool:
    """Whether diffusers' decoder, which runs without ComfyUI, computes the same."""
    if type(network) not in (AutoencoderKL, AutoencodingEngine) or type(network.decoder) is not Decoder:
        return False
    return getattr(network, "bn", None) is None and isinstance(network.decoder.conv_in, nn.Conv2d)


def _name_of(network: nn.Module, half: str) -> str:
    part = getattr(network, half, None)
    return type(network).__name__ + (f" with {type(part).__name__}" if part is not None else "")


def _dtype_of(tensor: Tensor, vae: comfy.sd.VAE) -> torch.dtype:
    return vae.vae_dtype if tensor.is_floating_point() else tensor.dtype


def _is_changed(network: nn.Module) -> bool:
    """Whether any layer does what its class does not, or pads its images otherwise."""
    for layer in network.modules():
        own = vars(layer)
        if any(name in own for name in _METHODS) or any(own.get(name) for name in _HOOKS):
            return True
        if getattr(layer, "padding_mode", "zeros") != "zeros":
            return True
    return False


def _number(network: nn.Module) -> int:
    """A number that no other network of this process has or had, as an address may."""
    if network not in _numbered:
        _numbered[network] = next(_numbers)
    return _numbered[network]


def _digest(tensors: Iterable[Tensor]) -> str:
    """Tells the weights of one network from what they become when something writes into them."""
    sums = []
    for tensor in tensors:
        integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
        sums.append(tensor.view(integers).sum(dtype=torch.int64))
    return f"{hash(tuple(torch.stack(sums).tolist())):x}"
