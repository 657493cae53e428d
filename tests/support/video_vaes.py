"""ComfyUI's own VAE networks, narrow and with random weights. Call `import_comfyui_here()` before building one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from parallel_backend.models.comfyui.tiny.weights import fill

_MODEL = "comfy.ldm.modules.diffusionmodules.model"
_HUNYUAN = "comfy.ldm.hunyuan_video"


@dataclass(frozen=True)
class VaeCase:
    """A VAE network. `build`: makes it; `channels`, `dims`: of its latents; `scale`: pixels per latent position and
    side; `frames`: number of latent frames -> number of video frames."""

    build: Callable[[], nn.Module]
    channels: int
    scale: int
    dims: int = 3
    frames: Callable[[int], int] = lambda t: 4 * t - 3


def wan21() -> nn.Module:
    """Returns a network wide enough that ComfyUI's detection, which reads the width, builds the same one."""
    from comfy.ldm.wan.vae import WanVAE

    return WanVAE(dim=16, z_dim=16, dim_mult=[1, 2, 4, 4], temperal_downsample=[False, True, True])


def _wan22() -> nn.Module:
    from comfy.ldm.wan.vae2_2 import WanVAE

    return WanVAE(dim=8, dec_dim=16, z_dim=6, dim_mult=[1, 2, 4, 4], temperal_downsample=[False, True, True])


def _sizes(**more: object) -> dict:
    sizes = dict(z_channels=4, resolution=64, in_channels=3, out_ch=3, ch=64, num_res_blocks=1)
    return dict(double_z=True, attn_resolutions=[], ch_mult=[1, 1, 1, 1], **sizes, **more)


def _kl(**more: object) -> nn.Module:
    from comfy.ldm.models.autoencoder import AutoencoderKL

    return AutoencoderKL(ddconfig=_sizes(**more), embed_dim=4)


def _without_quant() -> nn.Module:
    return _engine(_MODEL, _sizes(), "DiagonalGaussianRegularizer")


def _hunyuan(module: str, widths: list[int], factor: int, regularizer: str, **more: object) -> nn.Module:
    config = dict(z_channels=8, block_out_channels=widths, in_channels=3, out_channels=3, num_res_blocks=1)
    config |= dict(ffactor_spatial=factor, ffactor_temporal=4, **more)
    return _engine(module, config, regularizer)


def _engine(module: str, config: dict, regularizer: str) -> nn.Module:
    from comfy.ldm.models.autoencoder import AutoencodingEngine

    return AutoencodingEngine(
        regularizer_config={"target": f"comfy.ldm.models.autoencoder.{regularizer}"},
        encoder_config={"target": f"{module}.Encoder", "params": config},
        decoder_config={"target": f"{module}.Decoder", "params": config},
    )


def _refiner(refiner_vae: bool) -> nn.Module:
    regularizer = "EmptyRegularizer" if refiner_vae else "DiagonalGaussianRegularizer"
    return _hunyuan(f"{_HUNYUAN}.vae_refiner", [32, 32, 64, 64], 8, regularizer, refiner_vae=refiner_vae)


CASES = {
    "wan 2.1": VaeCase(wan21, 16, 8),
    "wan 2.2": VaeCase(_wan22, 6, 16),
    "hunyuanvideo": VaeCase(lambda: _kl(conv3d=True, time_compress=4), 4, 8),
    "hunyuanvideo 1.5": VaeCase(lambda: _refiner(True), 8, 8),
    "hunyuanimage refiner": VaeCase(lambda: _refiner(False), 8, 8, frames=lambda t: 4 * t if t > 1 else 1),
    "hunyuanimage 2.1": VaeCase(
        lambda: _hunyuan(f"{_HUNYUAN}.vae", [32, 32, 64, 64], 8, "DiagonalGaussianRegularizer"), 8, 8, dims=2
    ),
    "flux.2": VaeCase(lambda: _kl(batch_norm_latent=True), 16, 16, dims=2),
    "flux": VaeCase(_without_quant, 4, 8, dims=2),
    "sd": VaeCase(_kl, 4, 8, dims=2),
}


def build(name: str) -> nn.Module:
    """Builds a network with the same weights each time."""
    network = fill(CASES[name].build())
    for buffer, value in network.named_buffers():
        if buffer.endswith("running_var"):
            value.abs_().add_(0.5)
    return network
