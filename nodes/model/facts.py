"""The facts of a ComfyUI model that planning needs, from its file's header and its module's attributes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

import comfy.model_base
from comfy.ldm.modules.attention import SpatialTransformer
from comfy.ldm.modules.diffusionmodules.openaimodel import Downsample, UNetModel, Upsample
from torch import nn

from ...parallel_backend.models.comfyui.formats.stored_weights import by_stages
from ...parallel_backend.models.comfyui.model_file import ComfyUIModelFile, LatentSizes, UNetFacts, inspect
from ...parallel_backend.models.dtypes import ITEMSIZE
from ...parallel_backend.models.proof.states import ClassVerdict, trusted_mode
from ...parallel_backend.models.tokens.table import stage_lists
from ...parallel_backend.requests import BANDS, STAY

# The attributes under which ComfyUI's modules have these numbers.
_HEADS = ("num_heads", "num_attention_heads", "n_heads", "heads")
_WIDTH = ("hidden_size", "inner_dim", "dim", "model_channels", "features")
# The layer that reads a prompt first, by the module's class or one of its base classes. A prompt of another width than
# that layer takes cannot run. Classes that may replace the prompt, or take several, are left out.
_READS_PROMPT = {
    "Flux": "txt_in",
    "Chroma": "txt_in",
    "MageFlowTransformer2DModel": "txt_in",
    "QwenImageTransformer2DModel": "txt_in",
    "HunyuanVideo": "txt_in.input_embedder",
    "WanModel": "text_embedding.0",
    "NextDiT": "cap_embedder.1",
    "OpenAISignatureMMDITWrapper": "context_embedder",
    "MMDiT": "cond_seq_linear",  # AuraFlow
    "LTXVModel": "caption_projection.linear_1",
    "CogVideoXTransformer3DModel": "patch_embed.text_proj",
    "Kandinsky5": "text_embeddings.in_layer",
    "ErnieImageModel": "text_proj",
    "MiniTrainDIT": "blocks.0.cross_attn.k_proj",
    "LensTransformer2DModel": "txt_in",
    "OmniGen2Transformer2DModel": "time_caption_embed.caption_embedder.1",
    "BooguTransformer2DModel": "time_caption_embed.caption_embedder.1",
    "Ideogram4Transformer2DModel": "llm_cond_proj",
    "JoyImageTransformer3DModel": "condition_embedder.text_embedder.linear_1",
    "PixArtMS": "y_embedder.y_proj.fc1",
    "PixDiT_T2I": "y_embedder.proj",
    "AceStepConditionGenerationModel": "encoder.text_projector",
    "Hunyuan3Dv2": "cond_in",
    "HunYuanDiTPlain": "blocks.0.attn2.to_k",
    "LatentSeqMMFlowModel": "cond_embedder",
    "HunYuanDiT": "blocks.0.attn2.kv_proj",
}
# Classes whose `patch_size` describes their VAE's packing: each cell of the latent is a token.
_PATCHED_BEFORE = {"LensTransformer2DModel", "Ideogram4Transformer2DModel"}
_UNET_READS_PROMPT = ".attn2.to_k"


def count_facts(path: str, model: comfy.model_base.BaseModel, verdict: ClassVerdict) -> ComfyUIModelFile:
    """Returns the facts of the file at `path`, from which `model` was made. `verdict`: on the class of its module.
    Raises CheckpointError for a file that is refused."""
    header = inspect(path)
    module = model.diffusion_model
    mode = trusted_mode(type(module).__name__, {}, verdict)
    lists = stage_lists(type(module).__name__) if mode == STAY else ()
    weights = header.weights
    return replace(
        header,
        weights=replace(
            weights,
            blocks=by_stages(weights.blocks, {path: len(module.get_submodule(path)) for path in lists}),
            fp8_loaded_as=_fp8_loaded_as(weights.dtype, model),
        ),
        model=type(model).__name__,
        module=type(module).__name__,
        heads=0 if mode == BANDS else _number(_candidates(module), _HEADS),  # each band computes all heads
        width=_number([module], _WIDTH) or header.width,
        context_width=prompt_width(module),
        pooled_width=int(model.adm_channels or 0),
        latent=LatentSizes(
            channels=int(model.latent_format.latent_channels),
            patch=_patch(module),
            pixels=int(getattr(model.latent_format, "spacial_downscale_ratio", 8)),  # ComfyUI's spelling
        ),
        mode=mode,
        why_less=verdict.words,
        unet=(
            UNetFacts(_attention_of(module), _image_heads(module), _band_rows(module) if mode == BANDS else 0)
            if isinstance(module, UNetModel)
            else None
        ),
    )


def _fp8_loaded_as(stored: str, model: comfy.model_base.BaseModel) -> str:
    """Returns the dtype that a plain fp8 file is loaded as, else "": see StoredWeights.fp8_loaded_as."""
    dtype = str(model.get_dtype()).removeprefix("torch.")
    is_plain = getattr(model.model_config, "quant_config", None) is None
    return dtype if is_plain and stored.startswith("float8") and dtype != stored and dtype in ITEMSIZE else ""


def _band_rows(unet: nn.Module) -> int:
    """Returns how many rows of the latent one row of the lowest resolution covers."""
    layers = (layer for block in unet.input_blocks for layer in block)
    return 2 ** sum(isinstance(layer, Downsample) for layer in layers)


def _attention_of(unet: UNetModel) -> float:
    """Returns the FLOPs of self-attention for an image of 1024 x 1024 pixels, whose latent has 128 x 128 cells:
    queries x keys and weights x values of each layer, 4 * positions² * width."""
    return sum(
        4.0 * len(layer.transformer_blocks) * (share * 128**2) ** 2 * layer.proj_in.weight.shape[0]
        for layer, share in _attention_layers(unet)
    )


def _image_heads(unet: UNetModel) -> float:
    """Returns UNetFacts.heads: heads * positions² of the largest layer, in cells² of the latent."""
    return max(
        (
            layer.transformer_blocks[0].n_heads * share**2
            for layer, share in _attention_layers(unet)
            if layer.transformer_blocks
        ),
        default=0.0,
    )


def _attention_layers(unet: UNetModel) -> Iterator[tuple[SpatialTransformer, float]]:
    """Yields each attention layer with its positions as a share of the latent's cells."""
    share = 1.0
    for block in (*unet.input_blocks, unet.middle_block, *unet.output_blocks):
        for layer in block:
            if isinstance(layer, Downsample):
                share /= 4
            elif isinstance(layer, Upsample):
                share *= 4
            elif isinstance(layer, SpatialTransformer):
                yield layer, share


def _candidates(module: nn.Module) -> Iterable[nn.Module]:
    """Yields the module itself, then the modules in its lists: the first one with a number of heads counts."""
    yield module
    for child in module.modules():
        if isinstance(child, nn.ModuleList):
            yield from child.modules()


def prompt_width(module: nn.Module) -> int:
    """Returns the width of the only prompt that the module can read; 0 if it may take others, or none."""
    prepared = hasattr(module, "preprocess_text_embeds")
    if prepared or getattr(module, "caption_proj_before_connector", False):  # LTX's, if set
        return 0
    if isinstance(module, UNetModel):
        layers = (layer for name, layer in module.named_modules() if name.endswith(_UNET_READS_PROMPT))
        return int(getattr(next(layers, None), "in_features", 0))
    names = (_READS_PROMPT[kind.__name__] for kind in type(module).__mro__ if kind.__name__ in _READS_PROMPT)
    layer: object = module
    for name in next(names, "").split("."):
        layer = getattr(layer, name, None)
    return int(getattr(layer, "in_features", 0))


def _number(modules: Iterable[nn.Module], names: tuple[str, ...]) -> int:
    for module in modules:
        for name in names:
            value = module.__dict__.get(name)
            if isinstance(value, int) and value > 0:
                return value
    return 0


def _patch(module: nn.Module) -> tuple[int, int, int]:
    """Returns (frames, rows, columns) of the latent in a token; 1 each if the module does not say."""
    size = getattr(module, "patch_size", getattr(module, "patch", None))
    if type(module).__name__ in _PATCHED_BEFORE:
        return 1, 1, 1
    if size is None and hasattr(module, "patch_spatial"):  # Cosmos
        size = (module.patch_temporal, module.patch_spatial, module.patch_spatial)
    if isinstance(size, int):
        return 1, size, size
    if isinstance(size, (list, tuple)) and len(size) in (2, 3):
        frames, rows, columns = (1, *size)[-3:]
        return int(frames), int(rows), int(columns)
    return 1, 1, 1
