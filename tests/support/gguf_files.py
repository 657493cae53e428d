"""Tiny GGUF files of ComfyUI's Flux in every format that devices compute with, and their unpacked values."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy
import torch
from gguf import quants
from safetensors.torch import save_file
from torch import Tensor

# Formats to which gguf's Python code cannot quantise: byte offsets of the float16 scales in a block.
_SCALES = {
    "Q6_K": (208,),
    "Q5_K": (0, 2),
    "Q4_K": (0, 2),
    "Q3_K": (108,),
    "Q2_K": (80, 82),
    "IQ4_XS": (0,),
    "IQ4_NL": (0,),
}


def packed(weight: numpy.ndarray, kind: str, seed: int = 0) -> numpy.ndarray:
    """Returns the weight in a format, uint8 [rows, bytes]. Formats in _SCALES get random values of equal deviation."""
    form = gguf.GGMLQuantizationType[kind]
    if kind not in _SCALES:
        return quants.quantize(weight, form)
    values, size = gguf.GGML_QUANT_SIZES[form]
    blocks = numpy.random.default_rng(seed).integers(0, 256, (weight.size // values, size), dtype=numpy.uint8)
    for scale in (1.0, None):
        if scale is None:
            scale = weight.std() / quants.dequantize(blocks, form).std()
        for begin in _SCALES[kind]:
            blocks[:, begin : begin + 2] = numpy.array([scale], numpy.float16).view(numpy.uint8)
    return blocks.reshape(weight.shape[0], -1)


def write(path: Path, kind: str, tensors: dict[str, Tensor]) -> Path:
    """Writes the tensors of a Flux: the blocks' matrices in this format, one tensor in float16 with its true shape in
    the metadata, all others in float32."""
    writer = gguf.GGUFWriter(str(path), "flux")
    form = gguf.GGMLQuantizationType[kind]
    for seed, (name, tensor) in enumerate(tensors.items()):
        array = tensor.numpy()
        if _is_packed(name, tensor):
            if kind == "F16":
                writer.add_tensor(name, array.astype(numpy.float16))
            else:
                writer.add_tensor(name, packed(array, kind, seed), raw_dtype=form)
        elif name == "final_layer.linear.weight":
            writer.add_array(f"comfy.gguf.orig_shape.{name}", [int(size) for size in array.shape])
            writer.add_tensor(name, array.reshape(-1, 2 * array.shape[1]).astype(numpy.float16))
        else:
            writer.add_tensor(name, array)
    return finish(writer, path)


def finish(writer: gguf.GGUFWriter, path: Path) -> Path:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_unpacked(path: Path, kind: str, tensors: dict[str, Tensor]) -> Path:
    """Writes what `write` puts into a file, unpacked in float32 by gguf's own arithmetic."""
    found = dict(tensors)
    for seed, (name, tensor) in enumerate(tensors.items()):
        if _is_packed(name, tensor) and kind != "F16":
            data = packed(tensor.numpy(), kind, seed)
            found[name] = torch.from_numpy(quants.dequantize(data, gguf.GGMLQuantizationType[kind]))
        elif _is_packed(name, tensor) or name == "final_layer.linear.weight":
            found[name] = tensor.half().float()
    save_file({name: tensor.contiguous() for name, tensor in found.items()}, path)
    return path


def _is_packed(name: str, tensor: Tensor) -> bool:
    return "_blocks." in name and tensor.ndim == 2
