"""The dtypes of a model: what a file's weights are kept in, what is computed in, and how many bytes each takes."""

from __future__ import annotations

from dataclasses import dataclass

FP8 = "float8_e4m3fn"
ITEMSIZE = {"bfloat16": 2, "float16": 2, "float32": 4, FP8: 1}


@dataclass(frozen=True)
class Dtypes:
    """torch's names. `file`: of most of the file's bytes; `storage`: what large weights are kept in; `compute`: of
    activations."""

    file: str
    storage: str
    compute: str

    @classmethod
    def of(cls, wish: str, file: str, on_cpu: bool) -> Dtypes:
        """By ModelSpec.weight_dtype. The CPU keeps the mapped file as it is and casts on use; `auto` there computes
        halves in float32, as ComfyUI does."""
        if wish == FP8 or (wish == "auto" and file == FP8):
            return cls(file, FP8, "bfloat16")
        if wish == "auto":
            return cls(file, file, "float32" if on_cpu else file)
        return cls(file, file if on_cpu else wish, wish)
