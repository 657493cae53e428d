"""Loader nodes: they name a model's weights for the ranks, or put a LoRA on a model. ComfyUI's process reads only the
header of a model file."""

from __future__ import annotations

from dataclasses import replace

import comfy.sd
import comfy.utils
import folder_paths
import torch
from comfy_api.latest import io

from ..parallel_backend.devices import devices_of_a_run
from ..parallel_backend.errors import RequestError
from ..parallel_backend.models.checkpoint import check_name
from ..parallel_backend.models.diffusers.checkpoint import inspect_flux
from ..parallel_backend.options import ATTENTION_KERNELS, AUTO, DEFAULT_COMPUTE, SAME, ComputeOptions
from ..parallel_backend.planner.rules import StrategySettings
from ..parallel_backend.requests import FP8_FAST, WEIGHT_DTYPES
from .host.settings import default_settings, fingerprint
from .link_checks import check_links, refuse_literals
from .links import (
    CATEGORY,
    ModelLink,
    ParallelModel,
    compile_input,
    exchange_input,
    model_output,
    parallel_model_output,
    strategy_input,
)
from .model.files import PARTS, model_names, model_path
from .model.header_model import open_model
from .model.source import make_spec
from .parallel_model import over_devices

# ComfyUI's model_options for each weight_dtype of its Load Diffusion Model.
_OPTIONS: dict[str, dict[str, object]] = {
    "default": {},
    "fp8_e4m3fn": {"dtype": torch.float8_e4m3fn},
    "fp8_e4m3fn_fast": {"dtype": torch.float8_e4m3fn, "fp8_optimizations": True},
    "fp8_e5m2": {"dtype": torch.float8_e5m2},
}
DTYPES = tuple(_OPTIONS)


def _named(
    path: str, part: str, options: dict[str, object], settings: StrategySettings, computing: ComputeOptions
) -> ParallelModel:
    return over_devices(open_model(path, part, options), make_spec(path, part, options), settings, computing)


def name_model(
    folder: str, name: str, weight_dtype: str, settings: StrategySettings, computing: ComputeOptions
) -> ParallelModel:
    """Returns the model of a file in a ComfyUI folder, read as Load Diffusion Model or Load Checkpoint reads it."""
    path = model_path(folder, name)
    return _named(path, PARTS[folder], _OPTIONS[weight_dtype], settings, computing)


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
                    options=model_names(*PARTS),
                    tooltip="A .safetensors or .gguf file from models/diffusion_models or models/unet, or a "
                    ".safetensors file from models/checkpoints.",
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
                exchange_input(),
            ],
            outputs=[
                model_output(),
                parallel_model_output(),
            ],
        )

    validate_inputs = refuse_literals("strategy")
    fingerprint_inputs = classmethod(fingerprint)

    @classmethod
    def execute(
        cls,
        model_name: str,
        weight_dtype: str,
        strategy: StrategySettings | None = None,
        compile: str = AUTO,
        exchange_dtype: str = SAME,
    ) -> io.NodeOutput:
        check_links(strategy=strategy)
        folder = next(f for f in PARTS if folder_paths.get_full_path(f, model_name) or f == "checkpoints")
        computing = ComputeOptions(compile, exchange_dtype=exchange_dtype)
        parallel = name_model(folder, model_name, weight_dtype, strategy or default_settings(), computing)
        return io.NodeOutput(parallel.patcher, parallel)


def model_options(weight_dtype: str) -> dict[str, object]:
    """Returns ComfyUI's model_options for one of WEIGHT_DTYPES."""
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
    """Returns the model of a Flux.1 file. Reads only the header. Raises CheckpointError for other files, DeviceError,
    RequestError or StrategyError."""
    inspect_flux(path)
    devices_of_a_run(settings.devices)
    return _named(path, "diffusion_model", model_options(weight_dtype), settings, computing)


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
                    tooltip="A Flux.1 dev or schnell checkpoint, or a fine-tune, from models/diffusion_models or "
                    "models/unet.",
                ),
                io.Combo.Input(
                    "weight_dtype",
                    options=list(WEIGHT_DTYPES),
                    default="auto",
                    tooltip="auto is ComfyUI's choice: on most cards the file's own, but bfloat16 for a float32 file. "
                    "float8_e4m3fn halves the memory of 16-bit weights; it is computed in bfloat16.",
                ),
                strategy_input(),
                compile_input(),
                io.Combo.Input(
                    "attention",
                    options=list(ATTENTION_KERNELS),
                    default="auto",
                    optional=True,
                    tooltip="auto is the attention that ComfyUI itself would use, under Ring the fastest exact kernel "
                    "that is installed and works. sage is approximate. One that cannot run on your devices is refused "
                    "with the reason.",
                ),
                exchange_input(),
            ],
            outputs=[
                parallel_model_output(),
                model_output(),
            ],
        )

    validate_inputs = refuse_literals("strategy")
    fingerprint_inputs = classmethod(fingerprint)

    @classmethod
    def execute(
        cls,
        unet_name: str,
        weight_dtype: str,
        strategy: StrategySettings | None = None,
        compile: str = AUTO,
        attention: str = "auto",
        exchange_dtype: str = SAME,
    ) -> io.NodeOutput:
        check_links(strategy=strategy)
        path = model_path("diffusion_models", unet_name)
        computing = ComputeOptions(compile, attention, exchange_dtype)
        parallel = load_parallel_model(path, weight_dtype, strategy or default_settings(), computing)
        return io.NodeOutput(parallel, parallel.patcher)


class ParallelLoraLoader(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="ParallelLoraLoader",
            display_name="Parallel LoRA Loader",
            category=CATEGORY,
            description="Puts a LoRA on a parallel model; several nodes in a row stack. Another LoRA or strength "
            "changes the weights on the devices without loading the model again.",
            search_aliases=["multi gpu lora", "lora parallel", "lora loader"],
            inputs=[
                ModelLink.Input(
                    "parallel_model",
                    tooltip="From Parallel Model, a loader of this pack, or another of these.",
                ),
                io.Combo.Input(
                    "lora_name",
                    options=folder_paths.get_filename_list("loras"),
                    tooltip="A LoRA made for this model, from models/loras, in any layout that ComfyUI reads.",
                ),
                io.Float.Input(
                    "strength",
                    default=1.0,
                    min=-100.0,
                    max=100.0,
                    step=0.01,
                    tooltip="How strongly it changes the model; may be negative, and 0 leaves the LoRA out.",
                ),
            ],
            outputs=[parallel_model_output()],
        )

    validate_inputs = refuse_literals("parallel_model")

    @classmethod
    def execute(cls, parallel_model: ParallelModel, lora_name: str, strength: float) -> io.NodeOutput:
        check_links(parallel_model=parallel_model)
        if strength == 0.0:
            return io.NodeOutput(parallel_model)
        path = model_path("loras", lora_name)
        check_name(path)
        try:
            lora = comfy.utils.load_torch_file(path, safe_load=True)
            patcher, _ = comfy.sd.load_lora_for_models(parallel_model.patcher, None, lora, strength, 0.0)
        except RequestError as error:
            raise RequestError(f"{lora_name}: {error}") from None
        except (MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # ComfyUI's readers raise errors of any type for such a file
            raise RequestError(
                f"{lora_name} cannot be read as a LoRA ({type(error).__name__}: {error}): it is damaged, or none. "
                f"Download the file again, or choose another one."
            ) from error
        return io.NodeOutput(replace(parallel_model, patcher=patcher))
