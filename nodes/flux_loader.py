"""ParallelFluxLoader: names Flux.1 weights for the ranks; ComfyUI's own process never loads them."""

from __future__ import annotations

import torch
from comfy_api.latest import io

from ..parallel_backend.devices import devices_of_a_run
from ..parallel_backend.models.diffusers.checkpoint import inspect_flux
from ..parallel_backend.options import ATTENTION_KERNELS, AUTO, DEFAULT_COMPUTE, ComputeOptions
from ..parallel_backend.planner.rules import StrategySettings
from ..parallel_backend.requests import FP8_FAST, WEIGHT_DTYPES
from .host.settings import default_settings, fingerprint
from .link_checks import check_links, refuse_literals
from .links import CATEGORY, ParallelModel, compile_input, model_output, parallel_model_output, strategy_input
from .model.files import model_names, model_path
from .model.header_model import open_model
from .model.source import make_spec
from .parallel_model import over_devices

_PART = "diffusion_model"


def model_options(weight_dtype: str) -> dict[str, object]:
    """ComfyUI's model_options for one of WEIGHT_DTYPES."""
    if weight_dtype == "auto":
        return {}
    if weight_dtype == FP8_FAST:
        return {"dtype": torch.float8_e4m3fn, "fp8_optimizations": True}
    return {"dtype": getattr(torch, weight_dtype)}


def load_parallel_model(
    path: str,
    weight_dtype: str,
    settings: StrategySettings,
    computing: ComputeOptions = DEFAULT_COMPUTE,
) -> ParallelModel:
    """The model of a Flux.1 file. Reads its header and starts no ranks. Raises CheckpointError for other files,
    RequestError or StrategyError."""
    inspect_flux(path)
    devices_of_a_run(settings.devices)
    options = model_options(weight_dtype)
    return over_devices(
        open_model(path, _PART, options), make_spec(path, _PART, options), settings, computing
    )


class ParallelFluxLoader(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="ParallelFluxLoader",
            display_name="Parallel Flux Loader",
            category=CATEGORY,
            description="Names a Flux.1 checkpoint for sampling on several devices. The devices read the file "
            "themselves when sampling starts; this loads nothing into ComfyUI.",
            search_aliases=["multi gpu flux", "load flux parallel", "xdit loader", "unet loader"],
            inputs=[
                io.Combo.Input(
                    "unet_name",
                    options=model_names("diffusion_models"),
                    tooltip="A Flux.1 dev or schnell checkpoint, or a fine-tune, from models/diffusion_models.",
                ),
                io.Combo.Input(
                    "weight_dtype",
                    options=list(WEIGHT_DTYPES),
                    default="auto",
                    tooltip="auto keeps the file's own. float8_e4m3fn halves the memory; it is computed in bfloat16.",
                ),
                strategy_input(),
                compile_input(),
                io.Combo.Input(
                    "attention",
                    options=list(ATTENTION_KERNELS),
                    default="auto",
                    optional=True,
                    tooltip="auto takes the fastest exact kernel that is installed; sage is faster still and "
                    "approximate. One that cannot run on your GPUs is refused with the reason.",
                ),
            ],
            outputs=[
                parallel_model_output(),
                model_output(),
            ],
        )

    validate_inputs = refuse_literals("strategy")

    @classmethod
    def fingerprint_inputs(cls, **inputs: object) -> tuple:
        return fingerprint()

    @classmethod
    def execute(
        cls,
        unet_name: str,
        weight_dtype: str,
        strategy: StrategySettings | None = None,
        compile: str = AUTO,
        attention: str = "auto",
    ) -> io.NodeOutput:
        check_links(strategy=strategy)
        path = model_path("diffusion_models", unet_name)
        computing = ComputeOptions(compile, attention)
        parallel = load_parallel_model(path, weight_dtype, strategy or default_settings(), computing)
        return io.NodeOutput(parallel, parallel.patcher)
