"""Loader nodes: they name a model's weights for the ranks, or put a LoRA on a model. ComfyUI's process reads only the
header of a model file."""

from __future__ import annotations

from typing import Any

import comfy.sd
import comfy.utils
import folder_paths
import torch
from comfy_api.latest import io

from ..parallel_backend.devices import devices_of_a_run
from ..parallel_backend.errors import RequestError
from ..parallel_backend.models.checkpoint import check_name
from ..parallel_backend.options import ATTENTION_KERNELS, AUTO, DEFAULT_COMPUTE, SAME, ComputeOptions
from ..parallel_backend.planner.rules import StrategySettings
from ..parallel_backend.requests import ModelSpec
from .host.settings import default_settings, fingerprint
from .job.model import JobPatcher
from .links import (
    CATEGORY,
    ModelLink,
    check_links,
    compile_input,
    exchange_input,
    model_output,
    parallel_model_output,
    refuse_literals,
    strategy_input,
)
from .model.header_model import open_model
from .model.named_file import FILE_LOADERS, FileLoader, model_names, model_path
from .parallel_model import over_devices


def over_file(
    spec: ModelSpec, settings: StrategySettings | None, computing: ComputeOptions = DEFAULT_COMPUTE
) -> JobPatcher:
    """Returns the model of a file. Reads only its header. Raises CheckpointError, DeviceError, RequestError or
    StrategyError."""
    chosen = settings or default_settings()
    devices_of_a_run(chosen.devices)  # otherwise refused only once text encoders have run
    return over_devices(open_model(spec), spec, chosen, computing)


class _FileLoader(io.ComfyNode):
    """A node that names a model's file. `loader`: its files and their weight dtypes."""

    loader: FileLoader
    validate_inputs = refuse_literals("strategy")
    fingerprint_inputs = classmethod(fingerprint)

    @classmethod
    def execute(
        cls,
        weight_dtype: str,
        strategy: StrategySettings | None = None,
        compile: str = AUTO,
        attention: str = "auto",
        exchange_dtype: str = SAME,
        **name: str,
    ) -> io.NodeOutput:
        check_links(strategy=strategy)
        spec = cls.loader.find(name[cls.loader.input], weight_dtype)
        parallel = over_file(spec, strategy, ComputeOptions(compile, attention, exchange_dtype))
        return io.NodeOutput(parallel, parallel)


def _schema(cls: type[_FileLoader], *inputs: io.Input, file: str, dtype: str, **more: Any) -> io.Schema:
    """Returns the schema of a node that names a model's file. `inputs`: its own ones; `file`, `dtype`: tooltips."""
    names, options = model_names(*cls.loader.folders), list(cls.loader.options)
    return io.Schema(
        category=CATEGORY,
        inputs=[
            io.Combo.Input(cls.loader.input, options=names, tooltip=file),
            io.Combo.Input("weight_dtype", options=options, default=options[0], tooltip=dtype),
            strategy_input(),
            compile_input(),
            *inputs,
            exchange_input(),
        ],
        **more,
    )


class ParallelModelLoader(_FileLoader):
    loader = FILE_LOADERS["ParallelModelLoader"]

    @classmethod
    def define_schema(cls) -> io.Schema:
        return _schema(
            cls,
            node_id="ParallelModelLoader",
            display_name="Parallel Model Loader",
            description="Names a model of any family for sampling on several devices. The devices read the file "
            "themselves when sampling starts; this reads only its header.",
            search_aliases=["multi gpu loader", "load model parallel", "unet loader", "load diffusion model"],
            file="A .safetensors or .gguf file from models/diffusion_models or models/unet, or a .safetensors file "
            "from models/checkpoints.",
            dtype="As in Load Diffusion Model: default is ComfyUI's choice, fp8_e4m3fn and fp8_e5m2 halve the memory, "
            "fp8_e4m3fn_fast also multiplies in fp8.",
            outputs=[model_output(), parallel_model_output()],
        )


class ParallelFluxLoader(_FileLoader):
    loader = FILE_LOADERS["ParallelFluxLoader"]

    @classmethod
    def define_schema(cls) -> io.Schema:
        return _schema(
            cls,
            io.Combo.Input(
                "attention",
                options=list(ATTENTION_KERNELS),
                default="auto",
                optional=True,
                tooltip="auto is the attention that ComfyUI itself would use, under Ring the fastest exact kernel that "
                "is installed and works. sage is approximate. One that cannot run on your devices is refused with the "
                "reason.",
            ),
            node_id="ParallelFluxLoader",
            display_name="Parallel Flux Loader",
            description="Names a Flux.1 checkpoint for sampling on several devices. The devices read the file "
            "themselves when sampling starts; this loads nothing into ComfyUI.",
            search_aliases=["multi gpu flux", "load flux parallel", "xdit loader", "unet loader"],
            file="A Flux.1 dev or schnell checkpoint, or a fine-tune, from models/diffusion_models or models/unet.",
            dtype="auto is ComfyUI's choice: on most cards the file's own, but bfloat16 for a float32 file. "
            "float8_e4m3fn halves the memory of 16-bit weights; it is computed in bfloat16.",
            outputs=[parallel_model_output(), model_output()],
        )


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
    def execute(cls, parallel_model: JobPatcher, lora_name: str, strength: float) -> io.NodeOutput:
        check_links(parallel_model=parallel_model)
        if strength == 0.0:
            return io.NodeOutput(parallel_model)
        path = model_path("loras", lora_name)
        check_name(path)
        try:
            lora = comfy.utils.load_torch_file(path, safe_load=True)
            patcher, _ = comfy.sd.load_lora_for_models(parallel_model, None, lora, strength, 0.0)
        except RequestError as error:
            raise RequestError(f"{lora_name}: {error}") from None
        except (MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # ComfyUI's readers raise errors of any type for such a file
            raise RequestError(
                f"{lora_name} cannot be read as a LoRA ({type(error).__name__}: {error}): it is damaged, or none. "
                f"Download the file again, or choose another one."
            ) from error
        return io.NodeOutput(patcher)
