"""The dtypes of a model: of its weights in the file and in memory, of its activations, and the bytes of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..requests import FP8_FAST

FP8 = "float8_e4m3fn"
# Dtypes of weights that are cast to another dtype to compute, with bytes per value; "uint8": packed values.
QUANTISED = {FP8: 1, "float8_e5m2": 1, "int8": 1, "uint8": 1}
# Supported formats of GGUF files: bytes per value, including the scales of a block (ggml-common.h).
GGUF: dict[str, float] = {
    "Q8_0": 34 / 32,
    "Q6_K": 210 / 256,
    "Q5_K": 176 / 256,
    "Q5_1": 24 / 32,
    "Q5_0": 22 / 32,
    "Q4_K": 144 / 256,
    "Q4_1": 20 / 32,
    "Q4_0": 18 / 32,
    "IQ4_XS": 136 / 256,
    "IQ4_NL": 18 / 32,
    "Q3_K": 110 / 256,
    "Q2_K": 84 / 256,
}
ITEMSIZE = {"bfloat16": 2, "float16": 2, "float32": 4, **QUANTISED, FP8_FAST: 1}
# Bytes per value of every dtype and format that a file may have.
BYTES_PER_VALUE: dict[str, float] = {**ITEMSIZE, **GGUF}

HALVES = ("bfloat16", "float16")  # in the order that ComfyUI prefers for most families
# NVIDIA's compute capabilities below which bfloat16 is not in hardware, or fp16 at most half as fast as float32.
_BFLOAT16, _FLOAT16 = (8, 0), (7, 0)
# Turing cards without tensor cores, on which fp16 gives wrong numbers (ComfyUI's should_use_fp16).
_BROKEN_FLOAT16 = (
    "1660",
    "1650",
    "1630",
    "T500",
    "T550",
    "T600",
    "MX550",
    "MX450",
    "CMP 30HX",
    "T2000",
    "T1000",
    "T1200",
)
# AMD architectures without bfloat16: RDNA 2 and older (ComfyUI's AMD_RDNA2_AND_OLDER_ARCH).
_NO_BFLOAT16_AMD = (
    "gfx1030",
    "gfx1031",
    "gfx1035",
    "gfx1010",
    "gfx1011",
    "gfx1012",
    "gfx906",
    "gfx900",
    "gfx803",
)


def halves_of_card(capability: tuple[int, int], name: str, amd: str | None = None) -> tuple[str, ...]:
    """Returns the dtypes in HALVES that a card computes in, by ComfyUI's rules. `name`: name of the card; `amd`: ROCm's
    name of its architecture, None for NVIDIA's cards."""
    if amd is not None:
        return HALVES[1:] if any(arch in amd for arch in _NO_BFLOAT16_AMD) else HALVES
    if capability >= _BFLOAT16:
        return HALVES
    broken = any(card in name for card in _BROKEN_FLOAT16)
    return HALVES[1:] if capability >= _FLOAT16 and not broken else ()


@dataclass(frozen=True)
class Dtypes:
    """Three dtypes, by torch's names. `file`: dtype of most bytes of the file; `storage`: dtype of large weights in
    memory; `compute`: dtype of activations."""

    file: str
    storage: str
    compute: str

    @classmethod
    def of(cls, wish: str, file: str, on_cpu: bool, halves: Sequence[str] = HALVES) -> Dtypes:
        """Chooses the dtypes by ComfyUI's rules. `wish`: ModelSpec.weight_dtype; `halves`: the 16-bit dtypes that all
        devices compute in (halves_of_card).

        The CPU leaves the mapped file unchanged and casts on use; `auto` computes 16-bit weights in float32 there. On
        GPUs `auto` computes in the file's dtype if it is in `halves`, else in the first of them, else in float32.
        """
        wish = FP8 if wish == FP8_FAST else wish
        if on_cpu:
            quantised = (file if wish == "auto" else wish) in QUANTISED
            compute = "bfloat16" if quantised else "float32" if wish == "auto" else wish
            return cls(file, wish if wish in QUANTISED else file, compute)
        requested = file if wish == "auto" else wish
        if wish == "float32" or requested in halves:
            return cls(file, requested, requested)
        compute = halves[0] if halves else "float32"
        # Under `auto`, unquantised weights are stored in the compute dtype. Without halves they are cast on use.
        is_half = requested not in QUANTISED and requested not in GGUF
        return cls(file, compute if halves and wish == "auto" and is_half else requested, compute)
