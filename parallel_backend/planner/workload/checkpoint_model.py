"""A checkpoint as the model of a job."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace

from ...machine.fingerprint import hashed
from ...models.arithmetic import Family
from ...models.dtypes import BYTES_PER_VALUE, FP8
from ...models.model_file import ModelFile
from ...options import DEFAULT_COMPUTE, SAME, ComputeOptions
from ...requests import FP8_FAST
from ...strategy import ModelShape


@dataclass(frozen=True)
class CheckpointModel:
    """A checkpoint as ranks store and compute it. `weight_dtype`: as in ModelSpec."""

    file: ModelFile
    weight_dtype: str = "auto"
    compute_options: ComputeOptions = DEFAULT_COMPUTE

    @property
    def family(self) -> Family:
        return self.file.family

    @property
    def shape(self) -> ModelShape:
        return self.file.shape

    @property
    def weight_bytes(self) -> float:
        """The bytes of all weights in the dtype that ranks store."""
        stored = BYTES_PER_VALUE[self.file.dtype]
        return self.file.tensor_bytes * BYTES_PER_VALUE.get(self.weight_dtype, stored) / stored

    @property
    def uncompiled(self) -> CheckpointModel:
        """The same model without compiled blocks."""
        return self.with_compile("off")

    def with_compile(self, mode: str) -> CheckpointModel:
        """Returns the same model with `mode` (options.COMPILE_MODES) for its blocks."""
        return replace(self, compute_options=replace(self.compute_options, compile=mode))

    @property
    def in_fp8(self) -> CheckpointModel | None:
        """The same model with weights in fp8, None if they already are."""
        in_fp8 = self.file.dtype == FP8 or self.weight_dtype in (FP8, FP8_FAST)
        return None if in_fp8 else replace(self, weight_dtype=FP8)

    @property
    def key(self) -> str:
        """The model's key in measurements, without the compute dtype: that follows from these values and the device."""
        return hashed(*self.file.fingerprint, self.weight_dtype, *_options(self.compute_options))


def _options(compute_options: ComputeOptions) -> list[str]:
    """Returns the options that distinguish measurements. A newer option's default is left out, so that older
    measurements keep their keys."""
    options = asdict(compute_options)
    if options["exchange_dtype"] == SAME:
        del options["exchange_dtype"]
    return [f"{name}={value}" for name, value in options.items()]
