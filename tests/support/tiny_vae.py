"""Random VAEs of ComfyUI's class for Flux (without quant convolutions) and SD (with), small enough for tests."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from comfy_modules import CPU, import_comfyui_here
from parallel_backend.models.comfyui.rows.vae_halves import ComfyUIVae
from parallel_backend.models.comfyui.tiny.weights import fill
from tests.closed_forms.vae_sizes import VaeSizes
from video_vaes import HALVES, config_of, engine, kl

FLUX, SD = VaeSizes(), VaeSizes(channels=4, post_quant=True)


def random_vae(sizes: VaeSizes, seed: int = 0) -> nn.Module:
    """Returns ComfyUI's own network, float32; decode() of a latent [B, C, h, w] gives [B, 3, 8 h, 8 w]."""
    import_comfyui_here()
    levels = dict(ch=sizes.width, ch_mult=[1, 2, 4, 4], num_res_blocks=sizes.resnets - 1)
    config = config_of(z_channels=sizes.channels, **levels)
    return fill(kl(**config) if sizes.post_quant else engine(HALVES, config), seed)


def banded(sizes: VaeSizes) -> ComfyUIVae:
    """Returns the VAE's decoder as a rank has it."""
    return ComfyUIVae(random_vae(sizes), sizes.channels, 2, torch.float32, CPU)


def write_vae(path: Path, sizes: VaeSizes, seed: int = 0, **more: Tensor) -> Path:
    """Writes the decoder of a random VAE as stock VAELoader reads it. `more`: additional tensors."""
    path.parent.mkdir(parents=True, exist_ok=True)
    state = random_vae(sizes, seed).state_dict()
    of_decoder = {name: state[name] for name in state if not name.startswith(("encoder.", "quant_conv."))}
    save_file(of_decoder | more, path)
    return path


def random_latent(sizes: VaeSizes, height: int, width: int, batch: int = 1) -> Tensor:
    """Returns a random latent [batch, C, height, width]."""
    shape = (batch, sizes.channels, height, width)
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))
