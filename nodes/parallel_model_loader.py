"""ParallelModelLoader: names any model's file for the ranks; ComfyUI's own process reads its header only."""

from __future__ import annotations

import folder_paths
import torch
from comfy_api.latest import io

from ..parallel_backend.options import AUTO, ComputeOptions
from ..parallel_backend.planner.rules import StrategySettings
from .host.settings import default_settings, fingerprint
from .link_checks import check_links, refuse_literals
from .links import CATEGORY, ParallelModel, compile_input, model_output, parallel_model_output, strategy_input
from .model.files import GGUF_FOLDER, model_names, model_path
from .model.header_model import open_model
from .model.source import make_spec
from .parallel_model import over_devices

# By the choices of ComfyUI's Load Diffusion Model: its model_options.
_OPTIONS: dict[str, dict[str, object]] = {
    "default": {},
    "fp8_e4m3fn": {"dtype": torch.float8_e4m3fn},
    "fp8_e4m3fn_fast": {"dtype": torch.float8_e4m3fn, "fp8_optimizations": True},
    "fp8_e5m2": {"dtype": torch.float8_e5m2},
}
DTYPES = tuple(_OPTIONS)
# Folders of models by what ComfyUI loads from them (ComfyUISource.part).
_FOLDERS = {
    "diffusion_models": "diffusion_model",
    "checkpoints": "checkpoint",
    GGUF_FOLDER: "diffusion_model",
}


def name_model(
    folder: str, name: str, weight_dtype: str, settings: StrategySettings, compile_mode: str
) -> ParallelModel:
    """The model of a file in one of ComfyUI's folders, read as its Load Diffusion Model or Load Checkpoint does."""
    path = model_path(folder, name)
    part, options = _FOLDERS[folder], _OPTIONS[weight_dtype]
    return over_devices(
        open_model(path, part, options),
        make_spec(path, part, options),
        settings,
        ComputeOptions(compile_mode),
    )


class ParallelModelLoader(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="ParallelModelLoader",
            display_name="Parallel Model Loader",
            category=CATEGORY,
            description="Names a model of any family for sampling on several devices. The devices read the file "
            "themselves when sampling starts; this reads only its header.",
            search_aliases=["multi gpu loader", "load model parallel", "unet loader", "load diffusion model"],
            inputs=[
                io.Combo.Input(
                    "model_name",
                    options=model_names(*_FOLDERS),
                    tooltip="A .safetensors file from models/diffusion_models or models/checkpoints, or a .gguf file "
                    "from models/diffusion_models.",
                ),
                io.Combo.Input(
                    "weight_dtype",
                    options=list(DTYPES),
                    default="default",
                    tooltip="As in Load Diffusion Model: default is ComfyUI's choice, fp8_e4m3fn and fp8_e5m2 halve "
                    "the memory, fp8_e4m3fn_fast also multiplies in fp8.",
                ),
                strategy_input(),
                compile_input(),
            ],
            outputs=[
                model_output(),
                parallel_model_output(),
            ],
        )

    validate_inputs = refuse_literals("strategy")

    @classmethod
    def fingerprint_inputs(cls, **inputs: object) -> tuple:
        return fingerprint()

    @classmethod
    def execute(
        cls,
        model_name: str,
        weight_dtype: str,
        strategy: StrategySettings | None = None,
        compile: str = AUTO,
    ) -> io.NodeOutput:
        check_links(strategy=strategy)
        folder = next(f for f in _FOLDERS if folder_paths.get_full_path(f, model_name) or f == "checkpoints")
        parallel = name_model(folder, model_name, weight_dtype, strategy or default_settings(), compile)
        return io.NodeOutput(parallel.patcher, parallel)
