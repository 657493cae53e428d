"""ComfyUI's own VAE networks, narrow and with random weights. Call `import_comfyui_here()` before building one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pkgutil import resolve_name

from torch import nn

from parallel_backend.models.comfyui.tiny.weights import fill

_LDM = "comfy.ldm"
HALVES = f"{_LDM}.modules.diffusionmodules.model"  # of most VAEs
_GAUSSIAN = "DiagonalGaussianRegularizer"


@dataclass(frozen=True)
class VaeCase:
    """A VAE network. `build`: makes it; `channels`, `dims`: of its latents; `scale`: pixels per latent position and
    side; `frames`: number of latent frames -> number of video frames."""

    build: Callable[[], nn.Module]
    channels: int
    scale: int
    dims: int = 3
    frames: Callable[[int], int] = lambda t: 4 * t - 3


def _wan(module: str, **sizes: int) -> nn.Module:
    network = resolve_name(f"{_LDM}.wan.{module}:WanVAE")
    return network(dim_mult=[1, 2, 4, 4], temperal_downsample=[False, True, True], **sizes)


def config_of(**changes: object) -> dict:
    """Returns the config of an encoder or decoder of HALVES."""
    sizes = dict(z_channels=4, resolution=64, in_channels=3, out_ch=3, ch=64, num_res_blocks=1)
    return dict(double_z=True, attn_resolutions=[], ch_mult=[1, 1, 1, 1], **sizes) | changes


def kl(**changes: object) -> nn.Module:
    """Returns a VAE with quant convolutions."""
    config = config_of(**changes)
    network = resolve_name(f"{_LDM}.models.autoencoder:AutoencoderKL")
    return network(ddconfig=config, embed_dim=config["z_channels"])


def engine(module: str, config: dict, regularizer: str = _GAUSSIAN, decoder: dict | None = None) -> nn.Module:
    """Returns a VAE without quant convolutions. `decoder`: what differs from the Decoder of `module`."""
    autoencoder = f"{_LDM}.models.autoencoder"
    return resolve_name(f"{autoencoder}:AutoencodingEngine")(
        regularizer_config={"target": f"{autoencoder}.{regularizer}"},
        encoder_config={"target": f"{module}.Encoder", "params": config},
        decoder_config={"target": f"{module}.Decoder", "params": config} | (decoder or {}),
    )


def _hunyuan(module: str, regularizer: str = _GAUSSIAN, **more: object) -> nn.Module:
    config = dict(z_channels=8, block_out_channels=[32, 32, 64, 64], in_channels=3, out_channels=3)
    config |= dict(num_res_blocks=1, ffactor_spatial=8, ffactor_temporal=4, **more)
    return engine(f"{_LDM}.hunyuan_video.{module}", config, regularizer)


CASES = {
    # Wide enough that ComfyUI's detection, which reads the width, builds the same network.
    "wan 2.1": VaeCase(lambda: _wan("vae", dim=16, z_dim=16), 16, 8),
    "wan 2.2": VaeCase(lambda: _wan("vae2_2", dim=8, dec_dim=16, z_dim=6), 6, 16),
    "hunyuanvideo": VaeCase(lambda: kl(conv3d=True, time_compress=4), 4, 8),
    "hunyuanvideo 1.5": VaeCase(lambda: _hunyuan("vae_refiner", "EmptyRegularizer", refiner_vae=True), 8, 8),
    "hunyuanimage refiner": VaeCase(
        lambda: _hunyuan("vae_refiner", refiner_vae=False), 8, 8, frames=lambda t: 4 * t if t > 1 else 1
    ),
    "hunyuanimage 2.1": VaeCase(lambda: _hunyuan("vae"), 8, 8, dims=2),
    "flux.2": VaeCase(lambda: kl(batch_norm_latent=True), 16, 16, dims=2),
    "flux": VaeCase(lambda: engine(HALVES, config_of()), 4, 8, dims=2),
    "sd": VaeCase(kl, 4, 8, dims=2),
}


def build(name: str) -> nn.Module:
    """Builds a network with the same weights each time."""
    network = fill(CASES[name].build())
    for buffer, value in network.named_buffers():
        if buffer.endswith("running_var"):
            value.abs_().add_(0.5)
    return network
