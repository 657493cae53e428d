"""Random AutoencoderKLs of the real architecture (Flux without quant convolutions, SD with), small enough for tests."""

from __future__ import annotations

from pathlib import Path

import torch
from diffusers import AutoencoderKL
from safetensors.torch import save_file
from torch import Tensor

from parallel_backend.models.vae.keys import VaeDims, diffusers_names

WIDTHS = (32, 64, 128, 128)  # the real ones are (128, 256, 512, 512)


def dims_of(*, post_quant: bool = False, channels: int = 16, widths: tuple[int, ...] = WIDTHS) -> VaeDims:
    return VaeDims(channels, channels, 3, widths, resnets=3, post_quant=post_quant)


def random_vae(dims: VaeDims, seed: int = 0) -> AutoencoderKL:
    """diffusers' own, float32, with every bias and norm moved away from its start."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        vae = AutoencoderKL(
            down_block_types=("DownEncoderBlock2D",) * len(dims.widths),
            up_block_types=("UpDecoderBlock2D",) * len(dims.widths),
            block_out_channels=dims.widths,
            layers_per_block=dims.resnets - 1,
            latent_channels=dims.latent_channels,
            use_quant_conv=dims.post_quant,
            use_post_quant_conv=dims.post_quant,
        )
        for parameter in vae.parameters():
            if parameter.ndim == 1:
                parameter.data += 0.2 * torch.randn_like(parameter)
    return vae.eval().requires_grad_(False)


def ldm_tensors(vae: AutoencoderKL, dims: VaeDims) -> dict[str, Tensor]:
    """The decoder's tensors as ComfyUI names and shapes them."""
    state = vae.state_dict()
    tensors = {key: state[name] for key, name in diffusers_names(dims).items()}
    # The attention's projections are 1x1 convolutions there.
    return {
        key: tensor[:, :, None, None] if ".attn_1." in key and tensor.ndim == 2 else tensor
        for key, tensor in tensors.items()
    }


def write_vae(path: Path, dims: VaeDims, seed: int = 0, **more: Tensor) -> Path:
    """The decoder of a random VAE as stock VAELoader reads it, with tensors `more` beside it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    tensors = ldm_tensors(random_vae(dims, seed), dims)
    save_file({name: tensor.contiguous() for name, tensor in (tensors | more).items()}, path)
    return path


def random_latent(dims: VaeDims, height: int, width: int, batch: int = 1, seed: int = 1) -> Tensor:
    """[batch, C, height, width]"""
    shape = (batch, dims.latent_channels, height, width)
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))
