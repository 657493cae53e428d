"""ParallelLoraLoader: puts a LoRA on a PARALLEL_MODEL; the devices change their weights, the file is not read again."""

from __future__ import annotations

from dataclasses import replace

import comfy.sd
import comfy.utils
import folder_paths
import torch
from comfy_api.latest import io

from ..parallel_backend.errors import RequestError
from ..parallel_backend.models.checkpoint import check_name
from .link_checks import check_links, refuse_literals
from .links import CATEGORY, ModelLink, ParallelModel, parallel_model_output
from .model.files import model_path


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
        except Exception as error:  # whatever ComfyUI's readers make of such a file
            raise RequestError(
                f"{lora_name} cannot be read as a LoRA ({type(error).__name__}: {error}): it is damaged, or none. "
                f"Download the file again, or choose another one."
            ) from error
        return io.NodeOutput(replace(parallel_model, patcher=patcher))
