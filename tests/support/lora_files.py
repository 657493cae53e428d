"""LoRA files for the tiny Flux in every layout in use. Each changes the model clearly."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

H = 256  # width of the tiny Flux with two heads
UP_DOWN, B_A = ("lora_up.weight", "lora_down.weight"), ("lora_B.weight", "lora_A.weight")
GAIN = 0.05  # standard deviation of a delta's values


def pair(out: int, inputs: int, rank: int, seed: int) -> tuple[Tensor, Tensor]:
    """Returns (up [out, rank], down [rank, inputs]); the values of their product have a deviation of about GAIN."""
    generator = torch.Generator().manual_seed(seed)
    up = torch.randn(out, rank, generator=generator) * GAIN / rank**0.5
    return up, torch.randn(rank, inputs, generator=generator)


def _pairs(names: dict[str, tuple[int, int]], up: str, down: str, alpha: float | None = None) -> dict:
    found = {}
    for seed, (name, (out, inputs)) in enumerate(names.items()):
        found[f"{name}.{up}"], found[f"{name}.{down}"] = pair(out, inputs, 4, seed)
        if alpha is not None:
            found[f"{name}.alpha"] = torch.tensor(alpha)
    return found


def _drawn(prefix: str, seed: int, deviation: float, sizes: dict[str, tuple[int, ...]]) -> dict:
    """Returns random tensors of these sizes, by `prefix` and name."""
    generator = torch.Generator().manual_seed(seed)
    return {prefix + name: deviation * torch.randn(size, generator=generator) for name, size in sizes.items()}


ORIGINAL = {
    "double_blocks.0.img_attn.qkv": (3 * H, H),
    "double_blocks.0.txt_mlp.2": (H, 4 * H),
    "double_blocks.0.img_mod.lin": (6 * H, H),
    "single_blocks.0.linear1": (7 * H, H),
    "single_blocks.0.linear2": (H, 5 * H),
    "final_layer.adaLN_modulation.1": (2 * H, H),
}
DIFFUSERS = {
    "transformer_blocks.0.attn.to_q": (H, H),
    "transformer_blocks.0.attn.to_v": (H, H),
    "transformer_blocks.0.attn.add_k_proj": (H, H),
    "transformer_blocks.0.ff.net.2": (H, 4 * H),
    "single_transformer_blocks.0.attn.to_k": (H, H),
    "single_transformer_blocks.0.proj_mlp": (4 * H, H),
    "norm_out.linear": (2 * H, H),
    "x_embedder": (H, 64),
}
_ONE = {"double_blocks.0.img_attn.proj": (H, H)}


def _kohya(names: dict) -> dict:
    return {f"lora_unet_{name.replace('.', '_')}": size for name, size in names.items()}


def _xlabs() -> dict:
    sizes = {
        "double_blocks.0.processor.qkv_lora1": (3 * H, H),
        "double_blocks.0.processor.qkv_lora2": (3 * H, H),
        "double_blocks.0.processor.proj_lora1": (H, H),
        "single_blocks.0.processor.qkv_lora": (3 * H, H),
        # ComfyUI recognises the layout by these two layers, which the tiny model does not have.
        "double_blocks.18.processor.qkv_lora2": (3 * H, H),
        "single_blocks.37.processor.qkv_lora": (3 * H, H),
    }
    return _pairs(sizes, "up.weight", "down.weight")


def _bfl_own() -> dict:
    """Returns a LoRA with Black Forest Labs' names: no prefix, with biases and norms, and always with img_in."""
    found = _pairs({"img_in": (H, 64), **ORIGINAL}, *B_A)
    found |= _drawn("", 10, 0.2, {f"{name}.lora_B.bias": (out,) for name, (out, _) in ORIGINAL.items()})
    for norm in ("single_blocks.0.norm.key_norm", "double_blocks.0.img_attn.norm.query_norm"):
        found[f"{norm}.scale"] = 0.5 + torch.rand(128, generator=torch.Generator().manual_seed(11))
    return found


def _loha() -> dict:
    name = "lora_unet_double_blocks_0_img_mlp_0"
    sizes = {"w1_a": (4 * H, 3), "w1_b": (3, H), "w2_a": (4 * H, 3), "w2_b": (3, H)}
    return _drawn(f"{name}.hada_", 3, 0.4, sizes) | {f"{name}.alpha": torch.tensor(2.0)}


def _lokr() -> dict:
    whole, low = "lycoris_transformer_blocks_0_attn_to_k", "lycoris_single_transformer_blocks_0_proj_out"
    parts = {"w1": (4, 4), "w2_a": (H // 4, 4), "w2_b": (4, 5 * H // 4)}
    alphas = {f"{whole}.alpha": torch.tensor(1.0), f"{low}.alpha": torch.tensor(2.0)}
    both = {"w1": (16, 16), "w2": (16, 16)}
    return _drawn(f"{whole}.lokr_", 4, 0.3, both) | _drawn(f"{low}.lokr_", 5, 0.3, parts) | alphas


def _dora() -> dict:
    names = _kohya(ORIGINAL)
    found = _pairs(names, *UP_DOWN, alpha=2.0)
    generator = torch.Generator().manual_seed(5)
    for name, (out, inputs) in names.items():
        shape = (out, 1) if "linear2" not in name else (1, inputs)
        found[f"{name}.dora_scale"] = 1 + 0.2 * torch.rand(shape, generator=generator)
    return found


def _differences() -> dict:
    block = "diffusion_model.double_blocks.0."
    scale = torch.rand(128, generator=torch.Generator().manual_seed(6))
    found = _drawn(block, 6, 0.05, {"img_mlp.0.diff": (4 * H, H)})
    found |= _drawn(block, 7, 0.3, {"img_mlp.0.diff_b": (4 * H,)})
    return found | {f"{block}img_attn.norm.query_norm.set_weight": scale}


def _integers(names: dict) -> dict:
    """Returns factors of whole numbers, most of them 0, like a quantized LoRA without its scale."""
    generator = torch.Generator().manual_seed(9)
    found = {}
    for name, (out, inputs) in names.items():
        for part, size in (("up", (out, 4)), ("down", (4, inputs))):
            drawn = (torch.randn(size, generator=generator) / 3).round()
            found[f"{name}.lora_{part}.weight"] = drawn.to(torch.int8 if part == "up" else torch.int16)
        found[f"{name}.alpha"] = torch.tensor(1)
    return found


TEXT = _pairs({"lora_te1_text_model_encoder_layers_0_mlp_fc1": (128, 64)}, *UP_DOWN)
_PROJ = "lora_unet_double_blocks_0_img_attn_proj."
_CONSTRAINED = {f"{_PROJ}alpha": torch.tensor(1.5)}
LAYOUTS = {
    "kohya": _pairs(_kohya(ORIGINAL), *UP_DOWN, alpha=2.0),
    "kohya, no alpha, bf16": {
        key: tensor.bfloat16() for key, tensor in _pairs(_kohya(ORIGINAL), *UP_DOWN).items()
    },
    "bfl": _pairs({f"diffusion_model.{n}": s for n, s in ORIGINAL.items()}, *B_A),
    "bfl, own names": _bfl_own(),
    "peft": _pairs({f"transformer.{n}": s for n, s in DIFFUSERS.items()}, *B_A),
    "peft, alpha": _pairs({f"transformer.{n}": s for n, s in DIFFUSERS.items()}, *B_A, alpha=8.0),
    "onetrainer": _pairs(
        {f"lora_transformer_{n.replace('.', '_')}": s for n, s in DIFFUSERS.items()}, *UP_DOWN, alpha=1.0
    ),
    "xlabs": _xlabs(),
    "loha": _loha(),
    "lokr": _lokr(),
    "dora": _dora(),
    "differences": _differences(),
    "oft": _drawn(_PROJ, 7, 0.2, {"oft_blocks": (8, H // 8, H // 8)}),
    "oft, constrained": _drawn(_PROJ, 12, 0.2, {"oft_blocks": (8, H // 8, H // 8)}) | _CONSTRAINED,
    "boft": _drawn(_PROJ, 13, 0.2, {"oft_blocks": (2, H // 8, 8, 8)}) | _CONSTRAINED,
    "glora": _drawn(
        "lora_unet_single_blocks_0_linear2.",
        8,
        0.05,
        {"a1.weight": (5 * H, 4), "a2.weight": (4, 5 * H), "b1.weight": (H, 4), "b2.weight": (4, 5 * H)},
    ),
    "integers": _integers(_kohya(_ONE)),
}
# LoRAs for the node LoraLoader, which also changes a CLIP: one for both models, and one for the text encoder alone.
WITH_TEXT = {
    "both": TEXT | _pairs(_kohya(ORIGINAL), *UP_DOWN, alpha=2.0),
    "text": TEXT,
}
# Like those for Canny and Depth, which add an input.
WIDER = {
    "wider input": _bfl_own() | _pairs({"img_in": (H, 128)}, *B_A),
    "wider input, comfyui": _pairs({"diffusion_model.img_in": (H, 128)}, *B_A)
    | {"diffusion_model.img_in.reshape_weight": torch.tensor([H, 128])},
}
BAD = {
    "wrong shapes": _pairs({"lora_unet_double_blocks_0_img_attn_proj": (512, 512)}, *UP_DOWN),
    "no key": _pairs({"lora_unet_down_blocks_0_attn": (H, H)}, *UP_DOWN),
    "nan": {key: tensor * float("nan") for key, tensor in _pairs(_kohya(_ONE), *UP_DOWN).items()},
    "vector alpha": _pairs(_kohya(_ONE), *UP_DOWN)
    | {f"{name}.alpha": torch.tensor([1.0, 2.0]) for name in _kohya(_ONE)},
}


def of_all_layers(double_blocks: int) -> dict[str, Tensor]:
    """Returns a LoRA of all attention and MLP layers of that many double blocks, in kohya's layout."""
    wide = {"attn.qkv": (3 * H, H), "attn.proj": (H, H), "mlp.0": (4 * H, H), "mlp.2": (H, 4 * H)}
    names = {
        f"double_blocks.{block}.{side}_{name}": size
        for block in range(double_blocks)
        for side in ("img", "txt")
        for name, size in wide.items()
    }
    return _pairs(_kohya(names), *UP_DOWN, alpha=2.0)


def write_loras(folder: Path) -> dict[str, str]:
    """Writes each layout and each bad LoRA to `folder`; returns the file names by layout."""
    folder.mkdir(exist_ok=True)
    names = {}
    for layout, tensors in {**LAYOUTS, **WITH_TEXT, **WIDER, **BAD}.items():
        names[layout] = f"lora_{layout.replace(' ', '_').replace(',', '')}.safetensors"
        save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, folder / names[layout])
    return names
