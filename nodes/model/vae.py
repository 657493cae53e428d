"""The decoder of a ComfyUI VAE for the ranks; every VAE they cannot take is refused with the reason in words."""

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
from ...parallel_backend.wire.decode_messages import VaeWeights

# Methods that some node packs replace on single layers or on a whole VAE, such as those for seamless tiles.
_METHODS = ("forward", "_conv_forward", "decode")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")

_numbers = itertools.count(1)
_numbered: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()


def weights_of(vae: comfy.sd.VAE) -> VaeWeights:
    """The decoder's weights as the ranks take them. Raises RequestError with the reason why they cannot."""
    network = vae.first_stage_model
    decoder = getattr(network, "decoder", None)
    for part, kinds in ((network, (AutoencoderKL, AutoencodingEngine)), (decoder, (Decoder,))):
        if type(part) not in kinds:
            raise RequestError(
                f"its network is {type(part).__name__}, not that of Flux's and Stable Diffusion's"
            )
    if type(vae).decode is not comfy.sd.VAE.decode or "decode" in vars(vae) or _is_changed(network):
        raise RequestError("another node has changed how it computes")
    if vae.patcher.patches or vae.patcher.object_patches:
        raise RequestError("another node has patched it")
    state = network.state_dict()
    read_dims({name: tuple(tensor.shape) for name, tensor in state.items()})
    tensors = {name: state[name] for name in decoder_keys(state)}

    def as_computed() -> dict[str, Tensor]:
        return {name: tensor.to("cpu", vae.vae_dtype) for name, tensor in tensors.items()}

    return VaeWeights(f"{_number(network)} {_digest(tensors.values())} {vae.vae_dtype}", as_computed)


def _is_changed(network: nn.Module) -> bool:
    """Whether any layer does what its class does not, or pads its images otherwise."""
    for layer in network.modules():
        own = vars(layer)
        if any(name in own for name in _METHODS) or any(own.get(name) for name in _HOOKS):
            return True
        if getattr(layer, "padding_mode", "zeros") != "zeros":
            return True
    return network.decoder.tanh_out


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
