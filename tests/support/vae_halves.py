"""VAE decoders and encoders as ComfyUI's process sends them, and calls of them."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from comfy_modules import import_comfyui_here
from parallel_backend.job.payload import HalfVae
from parallel_backend.models.comfyui.rows.banded import STEPS
from parallel_backend.models.tokens.vae_networks import DECODER_ALONE, ENCODER_ALONE
from parallel_backend.sidecar.model_room import new_number
from parallel_backend.sidecar.module_requests import ModuleKind, ModuleRequest
from shipped_jobs import ship_module, ship_vae_call


class Half:
    """The decoder of `network`, or its encoder, with a new number. `sent`: how often it was sent to ranks."""

    def __init__(
        self,
        network: nn.Module,
        channels: int,
        dims: int,
        *,
        encodes: bool = False,
        scale: int = 8,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        module = copy.deepcopy(network)
        for part in DECODER_ALONE if encodes else ENCODER_ALONE:
            if hasattr(module, part):
                delattr(module, part)
        self.half = HalfVae(module, encodes, channels, dims, dtype, scale)
        self.number, self.sent = new_number(), 0
        self.bytes = sum(tensor.nbytes for tensor in module.state_dict().values())

    def request(
        self, inputs: Tensor, shares: tuple[float, ...] = (), keep: tuple[int, ...] = ()
    ) -> ModuleRequest:
        """Returns the request for a call. `keep`: numbers of other modules that ranks keep."""
        return ModuleRequest(
            ModuleKind.VAE_ENCODER if self.half.encodes else ModuleKind.VAE_DECODER,
            self.number,
            (self.number, *keep),
            self.bytes,
            import_comfyui_here(),
            lambda holdings: self.module_payload(),
            lambda holdings, is_new: ship_vae_call(inputs, shares),
            images=len(inputs),
            steps=STEPS * len(inputs),
        )

    def module_payload(self) -> dict[str, Tensor]:
        self.sent += 1
        return ship_module(self.half)
