"""The table of ComfyUI's VAE networks, by class: how ranks decode and encode with each."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any


class VaeMode(Enum):
    """A way to decode a latent. Each gives exactly the result of VAE Decode."""

    BANDS = "bands"  # each rank computes some rows and exchanges border rows
    TILES = "tiles"  # ranks share the tiles that the network always cuts itself
    ONE_DEVICE = "one device"  # ComfyUI decodes
    REFUSED = "refused"  # the network makes no picture


@dataclass(frozen=True)
class VaeNetwork:
    """One VAE network. `models`: the models that use it; `way`: how to decode; `decoder`: class of its decoder, "" for
    any; `encoder`: class of the encoder with which ranks encode in bands, otherwise ComfyUI encodes; `reason`: why
    ranks do not decode, in a user's words; `at_once`: True if each layer gets all frames in one call.
    """

    models: str
    way: VaeMode
    decoder: str = ""
    encoder: str = ""
    reason: str = ""
    at_once: bool = False


_KL = "comfy.ldm.modules.diffusionmodules.model"
_HUNYUAN_IMAGE, _HUNYUAN_VIDEO = "comfy.ldm.hunyuan_video.vae", "comfy.ldm.hunyuan_video.vae_refiner"
_WAN21, _WAN22 = "comfy.ldm.wan.vae", "comfy.ldm.wan.vae2_2"
_SVD = "comfy.ldm.modules.temporal_ae.VideoDecoder"
_LTX = "comfy.ldm.lightricks.vae.causal_video_autoencoder"
_MOCHI, _COG, _SEEDVR = "comfy.ldm.genmo.vae.model", "comfy.ldm.cogvideo.vae", "comfy.ldm.seedvr.vae"
_COSMOS = "comfy.ldm.cosmos.cosmos_tokenizer.layers3d"
_TAESD = "comfy.taesd.taesd"


def _banded(models: str, decoder: str, encoder: str = "", at_once: bool = False) -> VaeNetwork:
    return VaeNetwork(models, VaeMode.BANDS, decoder, encoder, at_once=at_once)


def _one_device(models: str, reason: str = "sound is decoded on one device") -> VaeNetwork:
    return VaeNetwork(models, VaeMode.ONE_DEVICE, reason=reason)


def _refused(models: str, reason: str) -> VaeNetwork:
    return VaeNetwork(models, VaeMode.REFUSED, reason=reason)


# All networks of which comfy/sd.py makes a VAE (tests/models/tokens/test_vae_classes.py compares them). In networks for
# bands, convolutions see at most one row above and below, and only group norms and attention see all rows;
# tests/engine/bands/ proves it.
NETWORKS: dict[str, tuple[VaeNetwork, ...]] = {
    "comfy.ldm.models.autoencoder.AutoencoderKL": (
        _banded("Flux.1, SD1.x, SD2.x, SDXL, SD3, Flux.2, HunyuanVideo", f"{_KL}.Decoder", f"{_KL}.Encoder"),
    ),
    "comfy.ldm.models.autoencoder.AutoencodingEngine": (
        _banded("Flux.1, SD and others of that kind", f"{_KL}.Decoder", f"{_KL}.Encoder"),
        _banded("HunyuanImage 2.1", f"{_HUNYUAN_IMAGE}.Decoder", f"{_HUNYUAN_IMAGE}.Encoder"),
        _banded(
            "HunyuanVideo 1.5, HunyuanImage 2.1's refiner",
            f"{_HUNYUAN_VIDEO}.Decoder",
            f"{_HUNYUAN_VIDEO}.Encoder",
        ),
        _banded("Stable Video Diffusion", _SVD, f"{_KL}.Encoder", at_once=True),
    ),
    f"{_WAN21}.WanVAE": (_banded("Wan 2.1, Qwen-Image", f"{_WAN21}.Decoder3d", f"{_WAN21}.Encoder3d"),),
    f"{_WAN22}.WanVAE": (_banded("Wan 2.2 5B", f"{_WAN22}.Decoder3d", f"{_WAN22}.Encoder3d"),),
    f"{_LTX}.VideoVAE": (_banded("LTX-Video, LTX-2", f"{_LTX}.Decoder"),),
    "comfy.ldm.cosmos.vae.CausalContinuousVideoTokenizer": (
        _banded("Cosmos 1", f"{_COSMOS}.DecoderFactorized", at_once=True),
    ),
    f"{_MOCHI}.VideoVAE": (_banded("Mochi", f"{_MOCHI}.Decoder", at_once=True),),
    f"{_COG}.AutoencoderKLCogVideoX": (_banded("CogVideoX", f"{_COG}.Decoder3D"),),
    f"{_SEEDVR}.VideoAutoencoderKLWrapper": (_banded("SeedVR2", f"{_SEEDVR}.Decoder3D"),),
    f"{_TAESD}.TAESD": (
        _banded("TAESD, TAESDXL, TAESD3, TAEF1", f"{_TAESD}.Decoder"),
        _banded("TAEF2", f"{_TAESD}.DecoderFlux2"),
    ),
    "comfy.taesd.taehv.TAEHV": (_banded("TAEHV, TAEW, LightTAE", "torch.nn.modules.container.Sequential"),),
    "comfy.ldm.minimax.vae.MiniMaxH3VideoVAE": (VaeNetwork("MiniMax H3", VaeMode.TILES),),
    "comfy.ldm.lightricks.vae.na_diffusion_decoder.CausalDiffusionVAE": (
        _one_device("LTX 2.4", "its attention looks at windows that bands would cut"),
    ),
    "comfy.ldm.mage_flow.vae.MageVAE": (
        _one_device("MageFlow", "its attention looks at windows that bands would cut"),
    ),
    "comfy.ldm.cascade.stage_a.StageA": (
        _one_device("Stable Cascade, stage A", "its upsampling is not known in bands"),
    ),
    "comfy.ldm.cascade.stage_c_coder.StageC_coder": (
        _one_device("Stable Cascade, stage C", "it makes previews of a few pixels"),
    ),
    "comfy.pixel_space_convert.PixelspaceConversionVAE": (
        _one_device("pixel space", "its latents are pixels: there is nothing to decode"),
    ),
    "comfy.ldm.lightricks.vae.audio_vae.AudioVAE": (_one_device("LTX-2, sound"),),
    "comfy.ldm.minimax.audio_vae.MiniMaxH3AudioVAE": (_one_device("MiniMax H3, sound"),),
    "comfy.ldm.minimax_music.dav.MiniMaxMusic3DAV": (_one_device("MiniMax Music 3"),),
    "comfy.ldm.audio.autoencoder.AudioOobleckVAE": (_one_device("Stable Audio 1, ACE-Step 1.5"),),
    "comfy.ldm.audio.vae_sa3.SA3AudioVAE": (_one_device("Stable Audio 3"),),
    "comfy.ldm.ace.vae.music_dcae_pipeline.MusicDCAE": (_one_device("ACE-Step"),),
    "comfy.ldm.mmaudio.vae.autoencoder.AudioAutoencoder": (_one_device("MMAudio"),),
    "comfy.ldm.hunyuan3d.vae.ShapeVAE": (
        _refused("Hunyuan3D", "it makes 3D shapes; use VAE Decode Hunyuan3D."),
    ),
    "comfy.ldm.trellis2.vae.ShapeVae": (
        _refused("Trellis 2, shapes", "it makes 3D shapes; use VaeDecodeShapeTrellis."),
    ),
    "comfy.ldm.trellis2.vae.TextureVae": (
        _refused("Trellis 2, textures", "it makes textures; use VaeDecodeTextureTrellis."),
    ),
    "comfy.ldm.triposplat.vae.OctreeGaussianDecoder": (
        _refused("TripoSplat", "it makes 3D splats; use TripoSplat Decode."),
    ),
}
# Decoders that take the frames of a video as images of one batch, and whose layers mix them.
_FRAMES_ARE_A_BATCH = {_SVD}
# Decoders whose latents may have the shape [B, C * frames, h, w].
_FRAMES_AMONG_CHANNELS = {f"{_SEEDVR}.Decoder3D"}
# Attributes of a network that only encoding needs, and those that only decoding needs.
ENCODER_ALONE = ("encoder", "quant_conv", "taesd_encoder")
DECODER_ALONE = ("decoder", "post_quant_conv", "conv2")


def known(network: Any) -> VaeNetwork | None:
    """Returns the entry for `network`, the first_stage_model of ComfyUI's VAE, or None."""
    decoder = _class_name(decoder_of(network))
    return next(
        (each for each in NETWORKS.get(_class_name(network), ()) if each.decoder in ("", decoder)), None
    )


def encodes_in_bands(network: Any) -> bool:
    """Returns True if ranks can encode in bands of rows. False if the network returns a random sample instead of the
    mean."""
    found = known(network)
    if found is None or getattr(getattr(network, "regularization", None), "sample", False):
        return False
    return found.encoder == _class_name(encoder_of(network))


def decoder_of(network: Any) -> Any:
    return getattr(network, "decoder", getattr(network, "taesd_decoder", None))


def encoder_of(network: Any) -> Any:
    return getattr(network, "encoder", getattr(network, "taesd_encoder", None))


def frames_are_a_batch(network: Any) -> bool:
    """Returns True if a latent [frames, C, h, w] is one video."""
    return _class_name(decoder_of(network)) in _FRAMES_ARE_A_BATCH


def frames_among_channels(network: Any) -> bool:
    """Returns True if a latent [B, C * frames, h, w] holds B videos."""
    return _class_name(decoder_of(network)) in _FRAMES_AMONG_CHANNELS


def _class_name(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"
