"""Random VAEs of ComfyUI's class for Flux (without quant convolutions) and SD (with), small enough for tests."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from comfy_modules import CPU, import_comfyui_here
from parallel_backend.models.comfyui.rows.vae_halves import ComfyUIVae
from parallel_backend.models.comfyui.tiny.weights import fill
from tests.closed_forms.vae_sizes import VaeSizes

FLUX, SD = VaeSizes(), VaeSizes(channels=4, post_quant=True)
_AUTOENCODER = "comfy.ldm.models.autoencoder"
_HALVES = "comfy.ldm.modules.diffusionmodules.model"


def random_vae(sizes: VaeSizes, seed: int = 0) -> nn.Module:
    """Returns ComfyUI's own network, float32; decode() of a latent [B, C, h, w] gives [B, 3, 8 h, 8 w]."""
    import_comfyui_here()
    from comfy.ldm.models.autoencoder import AutoencoderKL, AutoencodingEngine

    config = dict(z_channels=sizes.channels, resolution=64, in_channels=3, out_ch=3, ch=sizes.width)
    config |= dict(double_z=True, attn_resolutions=[], ch_mult=[1, 2, 4, 4], num_res_blocks=sizes.resnets - 1)
    if sizes.post_quant:
        return fill(AutoencoderKL(ddconfig=config, embed_dim=sizes.channels), seed)
    network = AutoencodingEngine(
        regularizer_config={"target": f"{_AUTOENCODER}.DiagonalGaussianRegularizer"},
        encoder_config={"target": f"{_HALVES}.Encoder", "params": config},
        decoder_config={"target": f"{_HALVES}.Decoder", "params": config},
    )
    return fill(network, seed)


def banded(sizes: VaeSizes, dtype: torch.dtype = torch.float32) -> ComfyUIVae:
    """Returns the VAE's decoder as a rank has it."""
    return ComfyUIVae(random_vae(sizes), sizes.channels, 2, dtype, CPU)


@cache
def vae_tensors(sizes: VaeSizes, seed: int = 0) -> dict[str, Tensor]:
    """Returns the decoder's tensors as in a file, by name."""
    state = random_vae(sizes, seed).state_dict()
    return {
        name: tensor for name, tensor in state.items() if not name.startswith(("encoder.", "quant_conv."))
    }


def write_vae(path: Path, sizes: VaeSizes, seed: int = 0, **more: Tensor) -> Path:
    """Writes the decoder of a random VAE as stock VAELoader reads it. `more`: additional tensors."""
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in (vae_tensors(sizes, seed) | more).items()}, path)
    return path


def random_latent(sizes: VaeSizes, height: int, width: int, batch: int = 1, seed: int = 1) -> Tensor:
    """Returns a random latent [batch, C, height, width]."""
    shape = (batch, sizes.channels, height, width)
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))
