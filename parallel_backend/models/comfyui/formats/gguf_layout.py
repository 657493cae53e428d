"""GGUF weights as quantised tensors of ComfyUI's kind, which unpack on use. For ranks only.

The GGUF quantiser of diffusers unpacks them, on any device, in float16 as ComfyUI-GGUF does by default.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import gguf
import torch
from comfy_kitchen.tensor.base import (
    BaseLayoutParams,
    QuantizedLayout,
    QuantizedTensor,
    register_layout_class,
)
from diffusers.quantizers.gguf.utils import dequantize_functions
from torch import Tensor

LAYOUT = "GGUFLayout"


@dataclass(frozen=True)
class GGUFParams(BaseLayoutParams):
    """Parameters of a packed tensor. `kind`: its format in ggml's spelling."""

    kind: str = ""

    def _tensor_fields(self) -> list[str]:
        return []  # a block holds its own scales


class GGUFLayout(QuantizedLayout):
    Params = GGUFParams

    @classmethod
    def quantize(cls, tensor: Tensor, **options: Any) -> tuple[Tensor, GGUFParams]:
        raise NotImplementedError("nothing packs weights as GGUF here")

    @classmethod
    def dequantize(cls, qdata: Tensor, params: GGUFParams) -> Tensor:
        kind = gguf.GGMLQuantizationType[params.kind]
        values, size = gguf.GGML_QUANT_SIZES[kind]
        blocks: Tensor = dequantize_functions[kind](qdata.view(-1, size), values, size)
        return blocks.reshape(params.orig_shape).to(params.orig_dtype)

    @classmethod
    def get_plain_tensors(cls, qtensor: Any) -> tuple[Tensor, ...]:
        return (qtensor._qdata,)

    @classmethod
    def state_dict_tensors(cls, qdata: Tensor, params: GGUFParams) -> dict[str, Tensor]:
        return {"": qdata}


register_layout_class(LAYOUT, GGUFLayout)


def packed(data: Tensor, kind: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Returns a packed tensor. `data`: its bytes, which are not copied; `dtype`: the dtype to unpack to."""
    tensor: Tensor = QuantizedTensor(data, LAYOUT, GGUFParams(None, dtype, shape, kind))
    return tensor


def is_packed(tensor: Any) -> bool:
    return isinstance(tensor, QuantizedTensor) and tensor._layout_cls == LAYOUT


def unpacking_to(tensor: Any, dtype: torch.dtype) -> Tensor:
    """Returns a packed tensor over the same bytes that unpacks to `dtype` (`tensor.to` would copy the bytes)."""
    return packed(tensor._qdata, tensor._params.kind, tensor._params.orig_shape, dtype)
