"""AutoencoderKL: named tensors in ldm layout to diffusers' decoder, not copied where none must change."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from diffusers.models.autoencoders.vae import Decoder
from diffusers.models.modeling_utils import no_init_weights
from diffusers.models.resnet import ResnetBlock2D
from torch import Tensor, nn

from .keys import GROUPS, VaeDims, diffusers_names, read_dims


class VaeDecoder(nn.Module):
    """The decoding half of AutoencoderKL, under the names it has there; its encoder is never built."""

    def __init__(self, dims: VaeDims) -> None:
        super().__init__()
        self.post_quant_conv = (
            nn.Conv2d(dims.latent_channels, dims.z_channels, 1) if dims.post_quant else nn.Identity()
        )
        self.decoder = Decoder(
            in_channels=dims.z_channels,
            out_channels=dims.out_channels,
            up_block_types=("UpDecoderBlock2D",) * len(dims.widths),
            block_out_channels=dims.widths,
            layers_per_block=dims.resnets - 1,
            norm_num_groups=GROUPS,
            act_fn="silu",
        )

    def forward(self, latent: Tensor) -> Tensor:
        """[B, C, h, w] -> [B, 3, scale * h, scale * w], about -1..1."""
        return self.decoder(self.post_quant_conv(latent))


@dataclass
class VaeModel:
    """base.BandedVae."""

    decoder: VaeDecoder
    dims: VaeDims
    compute_dtype: torch.dtype
    device: torch.device
    bytes: int

    latent_dims = 2
    min_side = 1

    @property
    def latent_channels(self) -> int:
        return self.dims.latent_channels

    @property
    def step_layers(self) -> Sequence[nn.Module]:
        return [layer for layer in self.decoder.modules() if isinstance(layer, ResnetBlock2D)]

    @property
    def steps(self) -> int:
        return len(self.step_layers)

    def layers_per_step(self, latent: Tensor) -> int:
        return 1

    def decode(self, latent: Tensor) -> Tensor:
        return self.decoder(latent)


def load_vae(tensors: dict[str, Tensor], device: torch.device) -> VaeModel:
    """The decoder with these tensors (ldm names). Raises RequestError for another architecture.

    It computes in the tensors' own dtype, on the CPU in float32.
    """
    dims = read_dims({name: tuple(tensor.shape) for name, tensor in tensors.items()})
    with torch.device("meta"), no_init_weights():
        decoder = VaeDecoder(dims)
    parameters = dict(decoder.named_parameters())
    names = diffusers_names(dims)
    state = {names[key]: tensors[key].reshape(parameters[names[key]].shape) for key in names}
    decoder.load_state_dict(state, assign=True)
    stored = tensors["decoder.conv_in.weight"].dtype
    dtype = torch.float32 if device.type == "cpu" else stored
    decoder.to(device=device, dtype=dtype).eval().requires_grad_(False)
    for layer in decoder.modules():
        if isinstance(layer, nn.SiLU):
            layer.inplace = True  # its input is a norm's output, which nothing else reads: one tensor less
    return VaeModel(decoder, dims, dtype, device, bytes=sum(tensor.nbytes for tensor in tensors.values()))
