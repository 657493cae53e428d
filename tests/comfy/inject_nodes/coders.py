"""Nodes that return tiny VAEs, VAEs that another pack has changed, and a VAE that makes no pictures."""

from __future__ import annotations

import contextlib
import json

import comfy.sd
import torch
from comfy.ldm.hunyuan3d.vae import ShapeVAE
from comfy.ldm.lightricks.vae.causal_video_autoencoder import VideoVAE
from comfy.ldm.modules.diffusionmodules import model as layers
from comfy.ldm.modules.diffusionmodules.model import Decoder, Encoder
from comfy.ldm.wan.vae import WanVAE
from comfy.taesd.taesd import TAESD
from comfy_api.latest import io

from .node import node

SWISH = layers.nonlinearity
_LTX = {
    "dims": 3,
    "latent_channels": 128,
    "norm_layer": "pixel_norm",
    "patch_size": 4,
    "encoder_blocks": [["res_x", {"num_layers": 1}]],
    "decoder_blocks": [
        ["res_x", {"num_layers": 1}],
        ["compress_all", {"residual": True, "multiplier": 2}],
        ["compress_space", {"multiplier": 2}],
        ["res_x", {"num_layers": 1}],
    ],
    "encoder_base_channels": 8,
    "decoder_base_channels": 4,
    "latent_log_var": "uniform",
    "timestep_conditioning": True,
    "decode_noise_scale": 0.5,
}


@node("TestTinyVAE")
def tiny_vae() -> io.Vae:
    """Returns a random TAESD for 16 channels, as VAELoader makes one from its file."""
    generator = torch.Generator().manual_seed(0)
    shapes = {name: tensor.shape for name, tensor in TAESD(latent_channels=16).state_dict().items()}
    sd = {name: 0.05 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    return comfy.sd.VAE(sd=sd)


def drawn(tensors, seed, norm):
    """Returns random weights of these shapes; weights with `norm` in their names are around 1."""
    generator, found = torch.Generator().manual_seed(seed), {}
    for name, tensor in tensors.items():
        drawn = torch.randn(tensor.shape, generator=generator)
        found[name] = 1 + 0.2 * drawn if norm in name else drawn * tensor[0].numel() ** -0.5
    return found


@node("TestWanVAE")
def wan_vae(channels: int) -> io.Vae:
    """Returns a narrow random Wan 2.1 VAE, as VAELoader makes one from its file. `channels`: picture channels."""
    sizes = {"dim": 16, "z_dim": 16, "image_channels": channels, "conv_out_channels": channels}
    network = WanVAE(**sizes, temperal_downsample=[False, True, True])
    return comfy.sd.VAE(sd=drawn(network.state_dict(), channels, "gamma"))


@node("TestImageVAE")
def image_vae() -> io.Vae:
    """Returns a random Flux.1 VAE, as VAELoader makes one from its file: a narrow decoder, an encoder of full width."""
    sizes = dict(z_channels=16, resolution=256, in_channels=3, out_ch=3, num_res_blocks=2)
    sizes |= dict(double_z=True, ch_mult=[1, 2, 4, 4], attn_resolutions=[])
    shapes = Decoder(ch=32, **sizes).state_dict(prefix="decoder.")
    sd = {name: torch.zeros(tensor.shape) for name, tensor in shapes.items()}
    sd |= drawn(Encoder(ch=128, **sizes).state_dict(prefix="encoder."), 0, "norm")
    return comfy.sd.VAE(sd=sd)


@node("TestLtxVAE")
def ltx_vae() -> io.Vae:
    """Returns a narrow random LTX-Video VAE, which draws noise when it decodes."""
    generator = torch.Generator().manual_seed(1)
    sd = VideoVAE(config=_LTX).state_dict()
    for name, tensor in sd.items():
        drawn = torch.randn(tensor.shape, generator=generator)
        sd[name] = drawn * max(1, tensor[:1].numel()) ** -0.5 if tensor.ndim > 1 else 1 + 0.2 * drawn
    return comfy.sd.VAE(sd=sd, metadata={"config": json.dumps({"vae": _LTX})})


@node("TestSeed", anew=True, not_idempotent=True)
def seed(latent: io.Latent, number: int) -> io.Latent:
    """Seeds the generator from which the next decode draws its noise, and passes the LATENT on."""
    torch.manual_seed(number)
    return latent


@node("TestShapeVAE")
def shape_vae() -> io.Vae:
    """Returns a VAE that has the class of Hunyuan3D's VAE and nothing else of it."""
    vae = comfy.sd.VAE(sd={"pixel_space_vae": torch.tensor(1.0)})
    vae.first_stage_model.__class__ = ShapeVAE
    return vae


@node("TestCircularVAE")
def circular_vae(vae: io.Vae) -> io.Vae:
    """Makes the convolutions of a VAE wrap around the image, as packs for seamless textures do."""
    for layer in vae.first_stage_model.modules():
        if isinstance(layer, torch.nn.Conv2d) and layer.kernel_size == (3, 3):
            layer.padding_mode = "circular"
    return vae


class _Brighter(torch.nn.Module):
    """Adds the mean of a whole picture before a layer."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x + x.mean())


_undo = contextlib.ExitStack()


@node("TestChangedVAE", anew=True)
def changed_vae(vae: io.Vae, change: str = "") -> io.Vae:
    """Changes the middle of a VAE's decoder in one way, and undoes the change before it."""
    _undo.close()
    block, attention = vae.first_stage_model.decoder.mid.block_1, vae.first_stage_model.decoder.mid.attn_1
    match change:
        case "number":
            _undo.callback(setattr, block.norm1, "eps", block.norm1.eps)
            block.norm1.eps = 0.3
        case "function":
            attend = attention.optimized_attention
            _undo.callback(setattr, attention, "optimized_attention", attend)
            attention.optimized_attention = lambda q, *others: attend(q.flip(-1), *others)
        case "method":
            _undo.callback(delattr, block.norm1, "forward_comfy_cast_weights")
            block.norm1.forward_comfy_cast_weights = lambda x: x + x.mean()
        case "layer":
            _undo.callback(setattr, block, "conv1", block.conv1)
            block.conv1 = _Brighter(block.conv1)
    return vae


def _other_swish(x):
    return torch.nn.functional.gelu(x)


def _counting_swish(x):
    _counting_swish.calls = getattr(_counting_swish, "calls", 0) + 1
    return _other_swish(x)


@node("TestOtherSwish")
def other_swish(vae: io.Vae, replaced: bool, counts: bool = False) -> io.Vae:
    """Replaces the activation function of ComfyUI's VAEs, as packs that speed them up do, or puts it back. `counts`: by
    one that counts its calls."""
    layers.nonlinearity = (_counting_swish if counts else _other_swish) if replaced else SWISH
    return vae
