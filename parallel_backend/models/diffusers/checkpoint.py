"""Reads a Flux.1 file's header: layout, prefix, sizes, dtype. Refuses other files and says what they are."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import ClassVar

from ...errors import CheckpointError
from ...requests import InputShapes
from ...strategy import ModelShape, ParallelStrategy
from .. import gguf_file
from ..arithmetic import BlockCounts, Family
from ..checkpoint import Header, read_header
from ..dtypes import Dtypes
from ..footprint import HeldWeights, MemoryPeak, TokenLoad
from .keys import FLUX_DEV, FluxDims, diffusers_shapes, original_shapes
from .memory import held_weights, moments

PREFIXES = ("", "model.diffusion_model.", "diffusion_model.", "transformer.", "model.")
DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32", "F8_E4M3": "float8_e4m3fn"}
AXES_DIMS = (16, 56, 56)  # rotary channels for (index, y, x); they add up to Flux's head_dim
LAYOUTS = ("original", "diffusers")
# For each size: the keys that show it, in the order of LAYOUTS, and the axis of their shapes.
_SIZES = {
    "hidden": ("img_in.weight", "x_embedder.weight", 0),
    "head_dim": (
        "single_blocks.0.norm.key_norm.scale",
        "single_transformer_blocks.0.attn.norm_q.weight",
        0,
    ),
    "mlp": ("double_blocks.0.img_mlp.0.weight", "transformer_blocks.0.ff.net.0.proj.weight", 0),
    "context_dim": ("txt_in.weight", "context_embedder.weight", 1),
    "pooled_dim": ("vector_in.in_layer.weight", "time_text_embed.text_embedder.linear_1.weight", 1),
    "in_channels": ("img_in.weight", "x_embedder.weight", 1),
    "out_channels": ("final_layer.linear.weight", "proj_out.weight", 0),
}
_BLOCKS = {
    "double_blocks": ("double_blocks", "transformer_blocks"),
    "single_blocks": ("single_blocks", "single_transformer_blocks"),
}
_GUIDANCE = ("guidance_in.in_layer.weight", "time_text_embed.guidance_embedder.linear_1.weight")
# A key that marks each spelling of Flux.1: (layout, ending of the head norms' keys in the original layout, key). The
# ending is "weight" if ComfyUI saved the file.
_MARKS = (
    ("original", "scale", "double_blocks.0.img_attn.norm.key_norm.scale"),
    ("original", "weight", "double_blocks.0.img_attn.norm.key_norm.weight"),
    ("diffusers", "scale", "single_transformer_blocks.0.proj_mlp.weight"),
)
# (part of a key, the other model that it shows); the first match counts. Some of these models share keys with Flux.1.
_OTHER_MODELS = (
    ("double_stream_modulation_img.", "a Flux.2 model"),
    ("distilled_guidance_layer.", "a Chroma model"),
    ("controlnet_", "a ControlNet, not a model"),
    ("lora_", "a LoRA, not a model"),
    ("txt_in.individual_token_refiner.", "a HunyuanVideo model"),
    ("transformer_blocks.0.img_mod.1.", "a Qwen-Image model"),
    ("joint_blocks.0.", "a Stable Diffusion 3 model"),
    ("pos_embed.proj.weight", "a Stable Diffusion 3 model"),
    ("input_blocks.0.0.weight", "a Stable Diffusion 1, 2 or XL model"),
    ("down_blocks.0.", "a diffusers UNet or VAE"),
)
# These are also in a full checkpoint next to a model, so they only count if there is no model.
_COMPANIONS = (
    ("decoder.conv_in.weight", "a VAE, not a diffusion model"),
    ("encoder.block.0.", "a text encoder, not a diffusion model"),
    ("text_model.", "a text encoder, not a diffusion model"),
)
# Prefixes of the other parts in a full checkpoint whose model has no prefix.
_BESIDE = ("vae.", "text_encoders.", "first_stage_model.")
_SCALED_FP8 = ("scale_weight", "scale_input", "scaled_fp8", "weight_scale", "input_scale", "comfy_quant")
# Input channels of an image token: the latent; with a latent of edges or depth; with a masked image and mask (Fill).
_IN_CHANNELS = (64, 128, 384)
_PATCH = 4  # latent pixels in an image token


@dataclass(frozen=True)
class FluxFile:
    """A checked Flux.1 checkpoint.

    `layout`: original or diffusers; `dtype`: of most of its bytes; `norm_ending`: ending of the head norms' keys in an
    original layout, scale or weight.
    """

    path: str
    layout: str
    prefix: str
    dims: FluxDims
    dtype: str
    tensor_bytes: int
    norm_ending: str = "scale"

    why_less: ClassVar[str] = ""

    @property
    def name(self) -> str:
        return Path(self.path).name

    @property
    def shape(self) -> ModelShape:
        return ModelShape(self.dims.heads, self.dims.blocks, self.name, sends_tokens=True)

    @property
    def family(self) -> Family:
        """The sizes for cost estimates. A double block has 36 h² parameters and a single block 15 h²; h = hidden."""
        doubles, singles, hidden = self.dims.double_blocks, self.dims.single_blocks, self.dims.hidden
        block = 12.0 * hidden * hidden  # multiply-adds per token: 4 h² of attention, 8 h² of feed-forward
        return Family(
            name="Flux.1",
            hidden=hidden,
            heads=self.dims.heads,
            blocks=(BlockCounts(doubles, block, block), BlockCounts(singles, block, block, reduces=1)),
            parameters=(36.0 * doubles + 15.0 * singles) * hidden * hidden,
            text_tokens=512,
        )

    @property
    def fingerprint(self) -> tuple[str, ...]:
        return (
            "flux",
            *(f"{name}={value}" for name, value in asdict(self.dims).items()),
            str(self.tensor_bytes),
        )

    @property
    def token_channels(self) -> int:
        return self.dims.out_channels

    def describe(self) -> str:
        form = "dev" if self.dims.guidance else "schnell"
        dims = self.dims
        return f"Flux.1 {form} form, {dims.double_blocks}+{dims.single_blocks} blocks of width {dims.hidden}"

    def held_weights(
        self, dtypes: Dtypes, strategy: ParallelStrategy, rank: int, *, on_cpu: bool
    ) -> HeldWeights:
        return held_weights(self.dims, dtypes, strategy, rank, on_cpu=on_cpu)

    def moments(self, block: int, call: TokenLoad, cast: int) -> Iterator[MemoryPeak]:
        return moments(self.dims, block, call, cast)

    @property
    def inputs(self) -> InputShapes:
        return InputShapes(
            model=self.name,
            context=self.dims.context_dim,
            pooled=self.dims.pooled_dim,
            channels_in=self.dims.in_channels // _PATCH,
            channels_out=self.dims.out_channels // _PATCH,
        )

    def stored_key(self, key: str) -> str:
        """Returns the name in the file of the parameter `key` of its layout."""
        return self.prefix + _respelled(key, "scale", self.norm_ending)


# The published FLUX.1-dev, for predictions without a file, with the size of its 12 billion parameters in bf16.
PUBLISHED_DEV = FluxFile("Flux.1", "original", "", FLUX_DEV, "bfloat16", tensor_bytes=23_800_000_000)


def inspect_flux(path: str | os.PathLike[str]) -> FluxFile:
    """Reads and checks the header of `path`. Raises CheckpointError with the file's name, the reason and the remedy."""
    header = read_header(path)
    layout, norm_ending, prefix = _find_model(header)
    _check_dtypes(header.name, _dtypes(header, prefix))
    entries = {
        _respelled(key.removeprefix(prefix), norm_ending, "scale"): entry
        for key, entry in header.tensors.items()
        if key.startswith(prefix)
    }
    shapes = {key: entry.shape for key, entry in entries.items()}
    dims = _dims_of(header.name, shapes, layout)
    _check_variant(header.name, dims)
    requested = (original_shapes if layout == "original" else diffusers_shapes)(dims)
    _check_keys(header.name, requested, shapes, prefix)
    sizes: Counter[str] = Counter()
    for key in requested:
        sizes[entries[key].dtype] += entries[key].end - entries[key].begin
    return FluxFile(
        path=header.path,
        layout=layout,
        prefix=prefix,
        dims=dims,
        dtype=DTYPES[sizes.most_common(1)[0][0]],
        tensor_bytes=sizes.total(),
        norm_ending=norm_ending,
    )


def _refused(name: str, reason: str, remedy: str = "choose a Flux.1 checkpoint") -> CheckpointError:
    return CheckpointError(f"{name} is refused: {reason}; {remedy}.")


def check_is_flux(path: str | os.PathLike[str]) -> None:
    """Raises CheckpointError, as inspect_flux does, for a file that is not Flux.1. Of formats that only ComfyUI's
    modules compute (GGUF, scaled and other quantised weights), it checks the names of tensors alone."""
    is_packed = gguf_file.is_gguf(path)
    header = gguf_file.read_header(path) if is_packed else read_header(path)
    _, _, prefix = _find_model(header)
    if not is_packed and all(
        dtype in DTYPES and not key.endswith(_SCALED_FP8) for key, dtype in _dtypes(header, prefix).items()
    ):
        inspect_flux(path)


def _dtypes(header: Header, prefix: str) -> dict[str, str]:
    """Returns the dtypes of the model's tensors by key, without the other parts of a checkpoint."""
    return {
        key: entry.dtype
        for key, entry in header.tensors.items()
        if key.startswith(prefix) and not key.startswith(_BESIDE)
    }


def _respelled(key: str, ending: str, other: str) -> str:
    """Turns the key `…_norm.ENDING` into `…_norm.OTHER`; other keys stay unchanged."""
    stem = key.removesuffix(f"_norm.{ending}")
    return key if stem == key else f"{stem}_norm.{other}"


def _find_model(header: Header) -> tuple[str, str, str]:
    """Returns (layout, norm ending, prefix)."""
    _refuse_other_models(header, _OTHER_MODELS)
    for layout, norm_ending, mark in _MARKS:
        for prefix in PREFIXES:
            if prefix + mark in header.tensors:
                return layout, norm_ending, prefix
    for entrance, layout in (("img_in.weight", "original"), ("x_embedder.weight", "diffusers")):
        if any(key.endswith(entrance) for key in header.tensors):
            mark = next(mark for of, _, mark in _MARKS if of == layout)
            raise _refused(header.name, f"it looks like Flux.1 but has no {mark}", "download the file again")
    _refuse_other_models(header, _COMPANIONS)
    raise _refused(header.name, "it is not a Flux.1 model")


def _refuse_other_models(header: Header, others: tuple[tuple[str, str], ...]) -> None:
    for part, what in others:
        if any(part in key for key in header.tensors):
            raise _refused(header.name, f"it is {what}")


def _check_dtypes(name: str, dtypes: dict[str, str]) -> None:
    """Raises CheckpointError unless all are plain floats. Called before shapes are checked: quantised ones differ."""
    for key in dtypes:
        if key.endswith(_SCALED_FP8):
            raise _refused(
                name,
                f"it stores scaled weights ({_shown(key)}), which diffusers' Flux.1 does not compute",
                "use a plain fp8_e4m3fn or a bf16 file",
            )
    for key, dtype in dtypes.items():
        if dtype not in DTYPES:
            raise _refused(
                name, f"{_shown(key)} is stored as {dtype}", f"use a file in {', '.join(DTYPES.values())}"
            )


def _shown(key: str) -> str:
    """Returns a key from the file, shortened and printable."""
    return key if len(key) <= 100 and key.isprintable() else repr(key[:80])


def _dim(name: str, shapes: dict[str, tuple[int, ...]], key: str, axis: int) -> int:
    if key not in shapes:
        raise _refused(name, f"the tensor {key} is missing", "download the file again")
    if axis >= len(shapes[key]):
        raise _refused(name, f"the tensor {key} has the shape {list(shapes[key])}", "download the file again")
    if not shapes[key][axis]:
        raise _refused(name, f"the tensor {key} is empty", "download the file again")
    return shapes[key][axis]


def _count_blocks(shapes: dict[str, tuple[int, ...]], prefix: str) -> int:
    pattern = re.compile(re.escape(prefix) + r"\.(\d{1,4})\.")
    return len({match[1] for key in shapes if (match := pattern.match(key))})


def _dims_of(name: str, shapes: dict[str, tuple[int, ...]], layout: str) -> FluxDims:
    own = LAYOUTS.index(layout)
    sizes = {size: _dim(name, shapes, keys[own], axis) for size, (*keys, axis) in _SIZES.items()}
    counts = {kind: _count_blocks(shapes, paths[own]) for kind, paths in _BLOCKS.items()}
    hidden, head_dim, mlp = sizes["hidden"], sizes["head_dim"], sizes["mlp"]
    if head_dim != sum(AXES_DIMS):
        raise _refused(name, f"its attention heads have {head_dim} channels and Flux.1 has {sum(AXES_DIMS)}")
    if hidden % head_dim:
        raise _refused(name, f"its width {hidden} is not a multiple of {head_dim}")
    if mlp != 4 * hidden:
        raise _refused(name, f"its feed-forward width {mlp} is not 4 x {hidden}, as in Flux.1")
    return FluxDims(heads=hidden // head_dim, guidance=_GUIDANCE[own] in shapes, **sizes, **counts)


def _check_variant(name: str, dims: FluxDims) -> None:
    if dims.in_channels in _IN_CHANNELS and dims.out_channels == 64:
        return
    raise _refused(
        name,
        f"it is a variant with {dims.in_channels} input and {dims.out_channels} output channels, which is not "
        f"supported",
        "use ComfyUI's own UNETLoader for it",
    )


def _check_keys(
    name: str, requested: dict[str, tuple[int, ...]], shapes: dict[str, tuple[int, ...]], prefix: str
) -> None:
    again = "download the file again"
    for key, shape in requested.items():
        if key not in shapes:
            raise _refused(name, f"the tensor {prefix + key} is missing", again)
        if shapes[key] != shape:
            raise _refused(
                name, f"{prefix + key} has the shape {list(shapes[key])}, not {list(shape)}", again
            )
    extra = sorted(key for key in set(shapes) - set(requested) if not key.startswith(_BESIDE))
    if extra:
        listed = ", ".join(map(_shown, extra[:3])) + (", …" if len(extra) > 3 else "")
        raise _refused(name, f"it has {len(extra)} tensors that Flux.1 does not ({listed})")
