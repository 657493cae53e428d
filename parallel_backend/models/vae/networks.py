"""ComfyUI's own VAE networks that are exact in bands of rows, by the names of their classes. Data alone."""

from __future__ import annotations

from typing import Any

# By class of the network, the classes of its decoder. Each looks at one row above and below at most in its
# convolutions, and at all rows only in group norms and in attention; tests/engine/vae/test_video_vaes.py proves it.
_KL_DECODERS = {
    "comfy.ldm.modules.diffusionmodules.model.Decoder",  # Flux.2; with conv3d HunyuanVideo
    "comfy.ldm.hunyuan_video.vae.Decoder",  # HunyuanImage 2.1
    "comfy.ldm.hunyuan_video.vae_refiner.Decoder",  # HunyuanVideo 1.5, HunyuanImage 2.1's refiner
}
_BANDED = {
    "comfy.ldm.wan.vae.WanVAE": {"comfy.ldm.wan.vae.Decoder3d"},  # Wan 2.1, Qwen-Image
    "comfy.ldm.wan.vae2_2.WanVAE": {"comfy.ldm.wan.vae2_2.Decoder3d"},  # Wan 2.2 5B
    "comfy.ldm.models.autoencoder.AutoencodingEngine": _KL_DECODERS,
    "comfy.ldm.models.autoencoder.AutoencoderKL": _KL_DECODERS,
}

# The same of their encoders; tests/engine/vae/test_encoder.py proves it.
_KL_ENCODERS = {
    "comfy.ldm.modules.diffusionmodules.model.Encoder",  # Flux, SD, SDXL, SD3, Flux.2, SVD; with conv3d HunyuanVideo
    "comfy.ldm.hunyuan_video.vae.Encoder",  # HunyuanImage 2.1
    "comfy.ldm.hunyuan_video.vae_refiner.Encoder",  # HunyuanVideo 1.5, HunyuanImage 2.1's refiner
}
_ENCODED = {
    "comfy.ldm.wan.vae.WanVAE": {"comfy.ldm.wan.vae.Encoder3d"},
    "comfy.ldm.wan.vae2_2.WanVAE": {"comfy.ldm.wan.vae2_2.Encoder3d"},
    "comfy.ldm.models.autoencoder.AutoencodingEngine": _KL_ENCODERS,
    "comfy.ldm.models.autoencoder.AutoencoderKL": _KL_ENCODERS,
}
# Of what only decoding needs, the tensors by which ComfyUI sees which network it is.
_TELLING = {
    "decoder.conv_in.weight",
    "decoder.conv_in.conv.weight",
    "decoder.middle.0.residual.0.gamma",
    "decoder.upsamples.0.upsamples.0.residual.2.weight",
    "decoder.head.0.gamma",
    "decoder.head.2.weight",
    "post_quant_conv.weight",
}


def splits_into_bands(network: Any) -> bool:
    """Whether `network`, the first_stage_model of ComfyUI's VAE, is one of those."""
    decoder = getattr(network, "decoder", None)
    return _class_name(decoder) in _BANDED.get(_class_name(network), ())


def is_for_decoding(name: str) -> bool:
    """Whether decoding needs this tensor of such a network, or ComfyUI to see which network it is."""
    return not name.startswith(("encoder.", "quant_conv.")) or name == "encoder.conv1.weight"


def encodes_in_bands(network: Any) -> bool:
    """Whether the encoder of `network` is one of those, and gives the mean of what it encodes, not a sample."""
    encoder = getattr(network, "encoder", None)
    if getattr(getattr(network, "regularization", None), "sample", False):
        return False
    return _class_name(encoder) in _ENCODED.get(_class_name(network), ())


def is_for_encoding(name: str) -> bool:
    """Whether encoding needs this tensor of such a network, or ComfyUI to see which network it is."""
    return not name.startswith(("decoder.", "post_quant_conv.", "conv2.")) or name in _TELLING


def _class_name(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"
