"""ComfyUI's VAE networks other than those of Wan and HunyuanVideo, narrow and with random weights. Call
`import_comfyui_here()` before building one."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from parallel_backend.models.comfyui.tiny.weights import fill
from parallel_backend.models.tokens.vae_networks import frames_are_a_batch
from video_vaes import VaeCase


def ltx_config(**more: object) -> dict:
    """Returns the config of a narrow LTX VAE. `more`: entries of LTX-Video 0.9.1 and later, or of LTX-2."""
    blocks = [["res_x", {"num_layers": 1}], ["compress_all", {"residual": True, "multiplier": 2}]]
    config = dict(dims=3, latent_channels=128, norm_layer="pixel_norm", patch_size=4)
    config |= dict(
        encoder_blocks=[["res_x", {"num_layers": 1}], ["compress_all", {}]],
        decoder_blocks=[*blocks, ["compress_space", {"multiplier": 2}], ["res_x", {"num_layers": 1}]],
        encoder_base_channels=8,
        decoder_base_channels=4,
        latent_log_var="uniform",
        causal_decoder=False,
    )
    return config | more


def ltx(**more: object) -> nn.Module:
    from comfy.ldm.lightricks.vae.causal_video_autoencoder import VideoVAE

    return VideoVAE(config=ltx_config(**more))


def _noisy_ltx() -> nn.Module:
    """Returns it as a rank decodes: the latent has its noise already, and the layers draw the same noise each time."""
    config = ltx_config(timestep_conditioning=True)
    config["decoder_blocks"] = [[name, dict(more)] for name, more in config["decoder_blocks"]]
    config["decoder_blocks"][0][1]["inject_noise"] = True
    network = ltx(**config)
    network.timestep_conditioning = False
    return network


def _svd() -> nn.Module:
    from comfy.ldm.models.autoencoder import AutoencodingEngine

    sizes = dict(z_channels=4, resolution=64, in_channels=3, out_ch=3, ch=32, num_res_blocks=1)
    config = dict(double_z=True, attn_resolutions=[], ch_mult=[1, 1, 1, 1], **sizes)
    video = config | dict(video_kernel_size=[3, 1, 1], alpha=0.0)
    return AutoencodingEngine(
        regularizer_config={"target": "comfy.ldm.models.autoencoder.DiagonalGaussianRegularizer"},
        encoder_config={"target": "comfy.ldm.modules.diffusionmodules.model.Encoder", "params": config},
        decoder_config={"target": "comfy.ldm.modules.temporal_ae.VideoDecoder", "params": video},
    )


def _cosmos() -> nn.Module:
    from comfy.ldm.cosmos.vae import CausalContinuousVideoTokenizer

    sizes = dict(
        z_channels=16, latent_channels=16, z_factor=1, resolution=1024, in_channels=3, out_channels=3
    )
    widths = dict(channels=8, channels_mult=[2, 4, 4], num_res_blocks=1, attn_resolutions=[32], dropout=0.0)
    return CausalContinuousVideoTokenizer(
        **sizes, **widths, patch_size=4, num_groups=1, temporal_compression=8, spacial_compression=8
    )


def _mochi() -> nn.Module:
    from comfy.ldm.genmo.vae.model import Decoder, VideoVAE

    network = VideoVAE.__new__(VideoVAE)  # __init__ would build the real sizes
    nn.Module.__init__(network)
    network.decoder = Decoder(
        latent_dim=12,
        base_channels=32,
        channel_multipliers=[1, 1, 1, 1],
        num_res_blocks=[1, 1, 1, 1, 1],
        temporal_expansions=[1, 2, 3],
        spatial_expansions=[2, 2, 2],
        has_attention=[False] * 5,
        padding_mode="replicate",
        output_norm=False,
    )
    return network


def _cogvideo() -> nn.Module:
    from comfy.ldm.cogvideo.vae import AutoencoderKLCogVideoX

    return AutoencoderKLCogVideoX(block_out_channels=(8, 8, 16, 16), layers_per_block=1, groups=4)


def _seedvr() -> nn.Module:
    from comfy.ldm.seedvr import vae

    widths, vae.BYTEDANCE_BLOCK_OUT_CHANNELS = vae.BYTEDANCE_BLOCK_OUT_CHANNELS, (32, 32, 64, 64)
    try:
        return vae.VideoAutoencoderKLWrapper()
    finally:
        vae.BYTEDANCE_BLOCK_OUT_CHANNELS = widths


def _taesd(channels: int) -> nn.Module:
    from comfy.taesd.taesd import TAESD

    return TAESD(latent_channels=channels)


def _taehv() -> nn.Module:
    from comfy import latent_formats
    from comfy.taesd.taehv import TAEHV

    return TAEHV(latent_channels=16, latent_format=latent_formats.HunyuanVideo)


def _minimax() -> nn.Module:
    """Returns a VAE with tiles of 3 latent positions that overlap by 1."""
    from comfy.ldm.minimax import vae

    decoder, vae.ViT3DDecoder = (
        vae.ViT3DDecoder,
        partial(vae.ViT3DDecoder, num_layers=2, heads=2, dim_head=16),
    )
    try:
        return vae.MiniMaxH3VideoVAE(ch=32, tile_size=48, tile_overlap_min=16)
    finally:
        vae.ViT3DDecoder = decoder


BANDED = {
    "ltx": VaeCase(lambda: ltx(), 128, 16, frames=lambda t: 2 * t - 1),
    "ltx with noise": VaeCase(_noisy_ltx, 128, 16, frames=lambda t: 2 * t - 1),
    "stable video diffusion": VaeCase(_svd, 4, 8, frames=lambda t: t),
    "cosmos": VaeCase(_cosmos, 16, 8, frames=lambda t: 8 * t - 7),
    "mochi": VaeCase(_mochi, 12, 8, frames=lambda t: 6 * t - 5),
    "cogvideox": VaeCase(_cogvideo, 16, 8, frames=lambda t: 4 * t - 3 if t % 2 else 4 * t),
    "seedvr2": VaeCase(_seedvr, 16, 8),
    "taesd": VaeCase(lambda: _taesd(16), 16, 8, dims=2),
    "taef2": VaeCase(lambda: _taesd(128), 128, 16, dims=2),
    "taehv": VaeCase(_taehv, 16, 8),
}
TILED = VaeCase(_minimax, 24, 16)


def build(case: VaeCase) -> nn.Module:
    """Builds a network without an encoder, with the same weights each time. Buffers that no file has stay unchanged."""
    network = case.build()
    for part in ("encoder", "quant_conv", "taesd_encoder"):
        if hasattr(network, part):
            delattr(network, part)
    kept = [value for name, value in network.named_buffers() if name not in network.state_dict()]
    values = [value.clone() for value in kept]
    for buffer, value in zip(kept, values, strict=True):
        buffer.data = value.clone()  # some are views of one number
    fill(network)
    for buffer, value in zip(kept, values, strict=True):
        buffer.data = value
    return network


def decoded(network: nn.Module, latent: Tensor) -> Tensor:
    """Decodes a latent [C, (t,) h, w] with ComfyUI's own network in one process; returns pixels [T, H, W, 3]."""
    torch.manual_seed(0)
    with torch.inference_mode():
        if frames_are_a_batch(network):
            return network.decode(latent.movedim(1, 0)).movedim(1, -1)
        pixels = network.decode(latent[None])[0]
    return (pixels if pixels.ndim == 4 else pixels[:, None]).permute(1, 2, 3, 0)
