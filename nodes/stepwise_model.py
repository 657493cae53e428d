"""A stock MODEL without weights: ComfyUI runs the loop, each model call goes to the ranks.

What such a call cannot honour yet is refused by the name of its effect, never dropped.
"""

from __future__ import annotations

import comfy.model_management
import comfy.model_patcher
import comfy.patcher_extension
import comfy.supported_models
import torch
from torch import Tensor, nn

from ..parallel_backend.flux_file import FluxFile
from ..parallel_backend.requests import Conditioning, ModelSpec, PredictRequest
from ..parallel_backend.selector import StrategyChoice
from ..parallel_backend.strategy import RequestShape
from .ranks import RunRecord, decide, interrupted, ready_sidecar
from .refusals import refuse_effects
from .stepwise_patcher import StepwisePatcher

# Keys under which the MODEL's transformer_options carry what belongs to this pack.
CHOICE, RECORD = "parallel_strategy", "parallel_record"


def make_stepwise_model(
    spec: ModelSpec, file: FluxFile, choice: StrategyChoice
) -> comfy.model_patcher.ModelPatcher:
    """The MODEL of `spec`. Starts nothing: ranks start with the first sampling."""
    family = comfy.supported_models.Flux if file.dims.guidance else comfy.supported_models.FluxSchnell
    config = family(
        {
            "image_model": "flux",
            "guidance_embed": file.dims.guidance,
            "in_channels": file.dims.in_channels // 4,
            "out_channels": file.dims.out_channels // 4,
            "depth": file.dims.double_blocks,
            "depth_single_blocks": file.dims.single_blocks,
            "hidden_size": file.dims.hidden,
            "disable_unet_model_creation": True,
        }
    )
    # The ranks round to the compute dtype; rounding here as well would lose the exact timestep.
    config.set_inference_dtype(torch.float32, None)
    model = config.get_model({}, "")
    model.diffusion_model = StepwiseFlux(spec, file)
    patcher = StepwisePatcher(
        model,
        load_device=comfy.model_management.get_torch_device(),
        offload_device=comfy.model_management.unet_offload_device(),
    )
    patcher.model_options["transformer_options"][CHOICE] = choice
    return patcher


class _Part(nn.Module):
    """A node on the way to a parameter; numbered ones answer to an index, as lists of blocks do."""

    def __getitem__(self, index: int) -> nn.Module:
        return self._modules[str(index)]


class StepwiseFlux(nn.Module):
    """Stands where ComfyUI expects Flux: the same call, answered by the ranks.

    Its parameters carry the names and shapes of the original layout on the meta device: no memory, but LoRA loaders
    find their targets, so that a LoRA is noticed instead of dropped.
    """

    def __init__(self, spec: ModelSpec, file: FluxFile) -> None:
        super().__init__()
        self.spec = spec
        self.file = file
        self.dtype = torch.float32
        self.patch_size = 2
        for key, shape in file.original_shapes.items():
            *path, name = key.split(".")
            module: nn.Module = self
            for part in path:
                if part not in module._modules:
                    module.add_module(part, _Part())
                module = module._modules[part]
            module.register_parameter(
                name, nn.Parameter(torch.empty(shape, device="meta"), requires_grad=False)
            )

    def forward(
        self,
        x: Tensor,
        timestep: Tensor,
        context: Tensor,
        y: Tensor | None = None,
        guidance: Tensor | None = None,
        ref_latents: list[Tensor] | None = None,
        control: dict | None = None,
        transformer_options: dict | None = None,
        **others: object,
    ) -> Tensor:
        """x [R, 16, h, w], timestep [R], context [R, T, D], y [R, P], guidance [R] -> velocity [R, 16, h, w]."""
        options = transformer_options or {}
        wrappers = comfy.patcher_extension.get_all_wrappers(
            comfy.patcher_extension.WrappersMP.DIFFUSION_MODEL, options
        )
        executor = comfy.patcher_extension.WrapperExecutor.new_class_executor(self._forward, self, wrappers)
        return executor.execute(x, timestep, context, y, guidance, ref_latents, control, options, **others)

    def _forward(
        self,
        x,
        timestep,
        context,
        y=None,
        guidance=None,
        ref_latents=None,
        control=None,
        options=None,
        **others,
    ) -> Tensor:
        refuse_effects(ref_latents, control, options, others)
        if y is None:
            y = x.new_zeros(len(x), self.file.dims.pooled_dim)
        conditioning = Conditioning(
            context.cpu(), y.cpu(), None if guidance is None else guidance.float().cpu()
        )
        request = PredictRequest(x.float().cpu(), timestep.float().cpu(), conditioning)
        rows = options.get("cond_or_uncond", [0])
        shape = RequestShape(batch=max(1, len(x) // len(rows)), has_cfg=len(set(rows)) > 1)
        record: RunRecord | None = options.get(RECORD)
        decision, devices = decide(options.get(CHOICE, StrategyChoice()), self.file.shape, shape)
        with ready_sidecar(self.spec, decision, devices, record) as (sidecar, placement):
            velocity, info = sidecar.predict(self.spec, request, placement, should_cancel=interrupted)
        if record is not None:
            record.runs.append(info)
        return velocity.to(x.device, x.dtype)
