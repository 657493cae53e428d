"""ComfyUI's VAE networks other than those of Wan and HunyuanVideo, narrow and with random weights. Call
`import_comfyui_here()` before building one."""

from __future__ import annotations

from functools import partial
from pkgutil import resolve_name
from unittest.mock import patch

import torch
from torch import Tensor, nn

from parallel_backend.models.comfyui.tiny.weights import fill
from parallel_backend.models.tokens.vae_networks import frames_are_a_batch
from video_vaes import HALVES, VaeCase, config_of, engine


def _ltx(**more: object) -> nn.Module:
    """Returns a narrow LTX VAE. `more`: options of the decoder's first block."""
    layers = {"num_layers": 1}
    last = [["compress_space", {"multiplier": 2}], ["res_x", layers]]
    decoder = [["res_x", layers | more], ["compress_all", {"residual": True, "multiplier": 2}], *last]
    config = dict(
        dims=3, latent_channels=128, norm_layer="pixel_norm", patch_size=4, latent_log_var="uniform"
    )
    config |= dict(encoder_blocks=[["res_x", layers], ["compress_all", {}]], decoder_blocks=decoder)
    config |= dict(encoder_base_channels=8, decoder_base_channels=4, causal_decoder=False)
    network = resolve_name("comfy.ldm.lightricks.vae.causal_video_autoencoder:VideoVAE")
    return network(config=config | {"timestep_conditioning": bool(more)})


def _noisy_ltx() -> nn.Module:
    """Returns it as a rank decodes: the latent has its noise already, and the layers draw the same noise each time."""
    network = _ltx(inject_noise=True)
    network.timestep_conditioning = False
    return network


def _svd() -> nn.Module:
    config = config_of(ch=32)
    video = config | dict(video_kernel_size=[3, 1, 1], alpha=0.0)
    decoder = {"target": "comfy.ldm.modules.temporal_ae.VideoDecoder", "params": video}
    return engine(HALVES, config, decoder=decoder)


def _cosmos() -> nn.Module:
    sizes = dict(z_channels=16, latent_channels=16, z_factor=1, resolution=1024, in_channels=3)
    widths = dict(channels=8, channels_mult=[2, 4, 4], num_res_blocks=1, attn_resolutions=[32], dropout=0.0)
    patches = dict(patch_size=4, num_groups=1, temporal_compression=8, spacial_compression=8)
    network = resolve_name("comfy.ldm.cosmos.vae:CausalContinuousVideoTokenizer")
    return network(out_channels=3, **sizes, **widths, **patches)


def _mochi() -> nn.Module:
    from comfy.ldm.genmo.vae.model import Decoder, VideoVAE

    network = VideoVAE.__new__(VideoVAE)  # __init__ would build the real sizes
    nn.Module.__init__(network)
    expansions = dict(temporal_expansions=[1, 2, 3], spatial_expansions=[2, 2, 2])
    blocks = dict(channel_multipliers=[1] * 4, num_res_blocks=[1] * 5, has_attention=[False] * 5)
    sizes = dict(latent_dim=12, base_channels=32, padding_mode="replicate", output_norm=False)
    network.decoder = Decoder(**sizes, **blocks, **expansions)
    return network


def _seedvr() -> nn.Module:
    from comfy.ldm.seedvr import vae

    with patch.object(vae, "BYTEDANCE_BLOCK_OUT_CHANNELS", (32, 32, 64, 64)):
        return vae.VideoAutoencoderKLWrapper()


def _cogvideo() -> nn.Module:
    network = resolve_name("comfy.ldm.cogvideo.vae:AutoencoderKLCogVideoX")
    return network(block_out_channels=(8, 8, 16, 16), layers_per_block=1, groups=4)


def _taesd(channels: int) -> nn.Module:
    return resolve_name("comfy.taesd.taesd:TAESD")(latent_channels=channels)


def _taehv() -> nn.Module:
    latent_format = resolve_name("comfy.latent_formats:HunyuanVideo")
    return resolve_name("comfy.taesd.taehv:TAEHV")(latent_channels=16, latent_format=latent_format)


def _minimax() -> nn.Module:
    """Returns a VAE with tiles of 3 latent positions that overlap by 1."""
    from comfy.ldm.minimax import vae

    narrow = partial(vae.ViT3DDecoder, num_layers=2, heads=2, dim_head=16)
    with patch.object(vae, "ViT3DDecoder", narrow):
        return vae.MiniMaxH3VideoVAE(ch=32, tile_size=48, tile_overlap_min=16)


BANDED = {
    "ltx": VaeCase(_ltx, 128, 16, frames=lambda t: 2 * t - 1),
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
    state = network.state_dict()
    kept = [(value, value.clone()) for name, value in network.named_buffers() if name not in state]
    for buffer, value in kept:
        buffer.data = value.clone()  # some are views of one number
    fill(network)
    for buffer, value in kept:
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
