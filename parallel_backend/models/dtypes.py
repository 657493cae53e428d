"""The dtypes of a model: what a file's weights are kept in, what is computed in, and how many bytes each takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..requests import FP8_FAST

FP8 = "float8_e4m3fn"
# Weights of one byte or less, which are computed in another dtype; "uint8": packed ones.
QUANTISED = {FP8: 1, "float8_e5m2": 1, "int8": 1, "uint8": 1}
# Formats of GGUF files that devices compute with: bytes per value of a block, its scales among them (ggml-common.h).
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
# The same of any format that a file may have.
BYTES_PER_VALUE: dict[str, float] = {**ITEMSIZE, **GGUF}

HALVES = ("bfloat16", "float16")  # as ComfyUI prefers them for most families
# Below, of NVIDIA's cards: no bfloat16 in hardware; fp16 at no more than half of float32's speed.
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
# RDNA 2 and older, which have no bfloat16 (ComfyUI's AMD_RDNA2_AND_OLDER_ARCH).
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
    """Those of HALVES that a card computes in, as ComfyUI decides it. `name`: the card's; `amd`: ROCm's name of its
    architecture, None for NVIDIA's cards."""
    if amd is not None:
        return HALVES[1:] if any(arch in amd for arch in _NO_BFLOAT16_AMD) else HALVES
    if capability >= _BFLOAT16:
        return HALVES
    broken = any(card in name for card in _BROKEN_FLOAT16)
    return HALVES[1:] if capability >= _FLOAT16 and not broken else ()


@dataclass(frozen=True)
class Dtypes:
    """torch's names. `file`: of most of the file's bytes; `storage`: what large weights are kept in; `compute`: of
    activations."""

    file: str
    storage: str
    compute: str

    @classmethod
    def of(cls, wish: str, file: str, on_cpu: bool, halves: Sequence[str] = HALVES) -> Dtypes:
        """By ModelSpec.weight_dtype. `halves`: those that all devices compute in (halves_of_card).

        The CPU keeps the mapped file as it is and casts on use; `auto` there computes halves in float32. On GPUs `auto`
        computes in the file's half or the first of `halves`, in float32 where there is none. All as ComfyUI does.
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
        # A half that is computed in another dtype is kept in that one, or cast on use where that is wider.
        is_half = requested not in QUANTISED and requested not in GGUF
        return cls(file, compute if halves and wish == "auto" and is_half else requested, compute)
