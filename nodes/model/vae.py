"""The weights of a ComfyUI VAE for the ranks; every VAE they cannot take is refused with the reason in words."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable

import comfy.sd
import torch
from torch import Tensor, nn

from ...parallel_backend.errors import RequestError
from ...parallel_backend.models.tokens.vae_networks import (
    Way,
    decoder_of,
    decoding_tensors,
    encoder_of,
    encodes_in_bands,
    encoding_tensors,
    frames_among_channels,
    frames_are_a_batch,
    known,
    told_beside,
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


def decoder_weights(vae: comfy.sd.VAE) -> VaeWeights:
    """The VAE's decoder as the ranks take it. Raises RequestError with the reason why they cannot."""
    network = vae.first_stage_model
    found = known(network)
    if found is None:
        raise RequestError(_not_known(network, decoder_of(network)))
    if found.way is Way.ONE_DEVICE:
        raise RequestError(found.reason)
    _refuse_changes(vae, "decode")
    if getattr(decoder_of(network), "tanh_out", False):
        raise RequestError(_CHANGED)
    return _weights(vae, decoding_tensors(network), metadata=told_beside(network, vae.latent_channels))


def encoder_weights(vae: comfy.sd.VAE) -> VaeWeights:
    """Its encoder, likewise."""
    network = vae.first_stage_model
    if not encodes_in_bands(network):
        raise RequestError(_not_known(network, encoder_of(network)))
    _refuse_changes(vae, "encode")
    return _weights(vae, encoding_tensors(network), encodes=True)


def refuse_other_kinds(vae: comfy.sd.VAE) -> None:
    """Raises RequestError for a VAE that makes no pictures."""
    found = known(vae.first_stage_model)
    if found is not None and found.way is Way.REFUSED:
        raise RequestError(f"This VAE makes no pictures: {found.reason}")


def cuts_tiles(vae: comfy.sd.VAE) -> bool:
    """Whether its network decodes in tiles, whoever calls it."""
    found = known(vae.first_stage_model)
    return found is not None and found.way is Way.TILES


def as_sent(vae: comfy.sd.VAE, latent: Tensor) -> Tensor:
    """The latent [B, C, …] as the ranks take it: with noise where the decoder goes by some, drawn here as its network
    would draw it, and the frames of a video in a dimension of their own."""
    network = vae.first_stage_model
    if getattr(network, "timestep_conditioning", False):
        placed = latent.to(vae.device, vae.vae_dtype)
        part = network.decode_noise_scale
        latent = torch.randn_like(placed) * part + (1.0 - part) * placed
    if latent.ndim == 4 and frames_among_channels(network) and latent.shape[1] % vae.latent_channels == 0:
        return latent.unflatten(1, (vae.latent_channels, -1))
    return latent.movedim(0, 1)[None] if frames_are_a_batch(network) else latent


def _refuse_changes(vae: comfy.sd.VAE, method: str) -> None:
    """Raises RequestError for a VAE whose `method` no longer computes as its class does."""
    own = getattr(type(vae), method) is getattr(comfy.sd.VAE, method) and method not in vars(vae)
    if not own or _is_changed(vae.first_stage_model):
        raise RequestError(_CHANGED)
    if vae.patcher.patches or vae.patcher.object_patches:
        raise RequestError("another node has patched it")


def _weights(
    vae: comfy.sd.VAE, state: dict[str, Tensor], *, metadata: str = "", encodes: bool = False
) -> VaeWeights:
    def as_computed() -> dict[str, Tensor]:
        return {name: tensor.to("cpu", _dtype_of(tensor, vae)) for name, tensor in state.items()}

    identity = f"{_number(vae.first_stage_model)} {_digest(state.values(), vae)} {vae.vae_dtype}"
    source = ComfyUISource(root=comfyui_root(), flags=numeric_flags())
    return VaeWeights(identity, as_computed, source, metadata, encodes)


def _not_known(network: nn.Module, half: nn.Module | None) -> str:
    name = type(network).__name__ + (f" with {type(half).__name__}" if half is not None else "")
    return f"its network is {name}, which the devices do not know how to share out exactly"


def _dtype_of(tensor: Tensor, vae: comfy.sd.VAE) -> torch.dtype:
    return vae.vae_dtype if tensor.is_floating_point() else tensor.dtype


def _is_changed(network: nn.Module) -> bool:
    """Whether any layer does what its class does not, or wraps its images round."""
    for layer in network.modules():
        own = vars(layer)
        if any(name in own for name in _METHODS) or any(own.get(name) for name in _HOOKS):
            return True
        if getattr(layer, "padding_mode", "zeros") == "circular":
            return True
    return False


def _number(network: nn.Module) -> int:
    """A number that no other network of this process has or had, as an address may."""
    if network not in _numbered:
        _numbered[network] = next(_numbers)
    return _numbered[network]


def _digest(tensors: Iterable[Tensor], vae: comfy.sd.VAE) -> str:
    """Tells the weights of one network from what they become when something writes into them. The same wherever they
    lie: with dynamic VRAM ComfyUI takes small ones to its GPU, some in the dtype that they are computed with, and
    leaves the others in the file's dtype in host memory."""
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    sums = []
    for tensor in tensors:
        computed = tensor.to(_dtype_of(tensor, vae))
        sums.append(computed.view(integers[computed.element_size()]).sum(dtype=torch.int64).cpu())
    return f"{hash(tuple(torch.stack(sums).tolist())):x}"
