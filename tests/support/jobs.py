"""Jobs for tests of the planner. Only the sizes of their model files exist, not the files."""

from dataclasses import replace

from parallel_backend.models.comfyui.model_file import TYPICAL, UNetFacts
from parallel_backend.models.diffusers.checkpoint import PUBLISHED_DEV, FluxFile
from parallel_backend.models.diffusers.keys import FLUX_DEV
from parallel_backend.options import ComputeOptions
from parallel_backend.planner.workload.checkpoint_model import CheckpointModel
from parallel_backend.planner.workload.workload import Job
from parallel_backend.requests import ROWS

BF16, FP8 = 23_800_000_000, 11_900_000_000  # bytes of a published Flux.1


def flux_file(tensor_bytes=BF16, dims=FLUX_DEV, path="/models/flux.safetensors"):
    dtype = "float8_e4m3fn" if tensor_bytes == FP8 else "bfloat16"
    return replace(PUBLISHED_DEV, path=path, dims=dims, dtype=dtype, tensor_bytes=tensor_bytes)


def file_of(dims, dtype):
    return FluxFile("/models/flux.safetensors", "original", "", dims, dtype, 0)


def flux_job(tensor_bytes=BF16, weight_dtype="auto", compute_options=None, **job):
    """Returns a Flux job. Default: 1024 x 1024, 512 text tokens, 28 steps."""
    model = CheckpointModel(flux_file(tensor_bytes), weight_dtype, compute_options or ComputeOptions())
    return Job(model, **job)


def unet_job(**job):
    """Returns a job of a UNet, whose tokens cannot be split."""
    weights = replace(TYPICAL.weights, blocks=())
    return Job(CheckpointModel(replace(TYPICAL, weights=weights, mode=ROWS, unet=UNetFacts())), **job)
