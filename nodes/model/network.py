"""A stock MODEL without weights: ComfyUI runs the loop, each model call goes to the ranks.

What such a call cannot honour yet is refused by the name of its effect, never dropped.
"""

from __future__ import annotations

from dataclasses import replace

import comfy.ldm.flux.layers
import comfy.model_management
import comfy.model_patcher
import comfy.ops
import comfy.patcher_extension
import comfy.supported_models
import torch
from torch import Tensor, nn

from ...parallel_backend.devices import is_cpu, resolve_devices
from ...parallel_backend.models.flux.checkpoint import FluxFile
from ...parallel_backend.models.flux.weight_bytes import Dtypes
from ...parallel_backend.options import DEFAULT_COMPUTE, ComputeOptions
from ...parallel_backend.planner.auto import image_work
from ...parallel_backend.planner.decide import ExecutionPlan
from ...parallel_backend.planner.rules import StrategySettings
from ...parallel_backend.requests import (
    Conditioning,
    ModelSpec,
    Placement,
    PredictRequest,
    RunInfo,
    check_numbers,
)
from ...parallel_backend.sidecar.sidecar import Sidecar
from ...parallel_backend.wire.weight_patches import NO_PATCHES
from ..host.calls import RunRecord, decide, interrupted, ready_sidecar, say
from ..host.memory import size_on, watch
from .inputs import take_extras
from .patcher import COMPUTING, PATCHES, StepwisePatcher
from .unsupported import refuse_effects

_NORM_ENDING = next(
    name.removeprefix("query_norm.")
    for name in comfy.ldm.flux.layers.QKNorm(
        1, device="meta", operations=comfy.ops.disable_weight_init
    ).state_dict()
    if name.startswith("query_norm.")
)

_FILL_CHANNELS = 384  # of an image token: latent, image and mask
# Keys under which the MODEL's transformer_options carry what belongs to this pack.
CHOICE, RECORD = "parallel_strategy", "parallel_record"


def make_stepwise_model(
    spec: ModelSpec, file: FluxFile, choice: StrategySettings, compute_options: ComputeOptions
) -> comfy.model_patcher.ModelPatcher:
    """The MODEL of `spec`. Starts nothing: ranks start with the first sampling."""
    family = _family(file)
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
    patcher.model_options["transformer_options"] |= {CHOICE: choice, COMPUTING: compute_options}
    return patcher


def comfyui_key(key: str) -> str:
    """The original name of a parameter as this ComfyUI has it: it came to call the scale of a norm its weight."""
    return key.removesuffix("scale") + _NORM_ENDING if key.endswith("_norm.scale") else key


def _family(file: FluxFile) -> type[comfy.supported_models.Flux]:
    """ComfyUI's description of it; Fill is one of its own, Canny and Depth are dev with more input channels."""
    if file.dims.in_channels == _FILL_CHANNELS:
        return comfy.supported_models.FluxInpaint
    return comfy.supported_models.Flux if file.dims.guidance else comfy.supported_models.FluxSchnell


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
        # What nodes read of ComfyUI's own class.
        self.patch_size = 2
        self.in_channels, self.out_channels = file.dims.in_channels, file.dims.out_channels
        self.hidden_size, self.num_heads = file.dims.hidden, file.dims.heads
        watch(self, spec)
        self._decided: tuple[tuple, Tensor | None, ExecutionPlan] | None = (
            None  # its key, the run's sigmas, and what runs
        )
        for key, shape in file.original_shapes.items():
            *path, name = comfyui_key(key).split(".")
            module: nn.Module = self
            for part in path:
                if part not in module._modules:
                    module.add_module(part, _Part())
                module = module._modules[part]
            module.register_parameter(
                name, nn.Parameter(torch.empty(shape, device="meta"), requires_grad=False)
            )

    def size_on(self, device: torch.device) -> int:
        """Bytes of its weights on one of ComfyUI's devices, while ranks hold them."""
        return size_on(device, self.file, None if self._decided is None else self._decided[2])

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
        """x [R, C, h, w], timestep [R], context [R, T, D], y [R, P], guidance [R] -> velocity [R, 16, h, w]."""
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
        extras = take_extras(
            x,
            ref_latents,
            control,
            others,
            self.file.dims,
            self._compute_dtype(options.get(CHOICE, StrategySettings())),
            options.get("rope_options"),
        )
        refuse_effects(options, others)
        if y is None:
            y = x.new_zeros(len(x), self.file.dims.pooled_dim)
        conditioning = Conditioning(
            context.cpu(), y.cpu(), None if guidance is None else guidance.float().cpu()
        )
        request = PredictRequest(x.float().cpu(), timestep.float().cpu(), conditioning, extras)
        record: RunRecord | None = options.get(RECORD)
        decided = self._decide(request, options)
        if record is not None:
            record.decided = decided
        patches = options.get(PATCHES, NO_PATCHES)
        compute_options = options.get(COMPUTING, DEFAULT_COMPUTE)
        with ready_sidecar(
            self.spec, decided.decision, decided.devices, record, patches, compute_options
        ) as (
            sidecar,
            placement,
        ):
            velocity, info = sidecar.predict(
                self.spec, request, placement, on_phase=say, should_cancel=interrupted, patches=patches
            )
        if torch.isfinite(request.x).all():
            check_numbers(velocity, f"at sigma {request.sigma.max().item():.4g}")
        if record is not None:
            record.runs.append(info)
        return velocity.to(x.device, x.dtype)

    def _compute_dtype(self, choice: StrategySettings) -> torch.dtype:
        on_cpu = is_cpu(resolve_devices(choice.devices))
        return getattr(torch, Dtypes.of(self.spec.weight_dtype, self.file.dtype, on_cpu).compute)

    def _decide(self, request: PredictRequest, options: dict) -> ExecutionPlan:
        """Once for all like calls of a sampling run: what is measured meanwhile must not change it half-way."""
        rows = options.get("cond_or_uncond", [0])
        choice, sigmas = options.get(CHOICE, StrategySettings()), options.get("sample_sigmas")
        shape = (max(1, len(request.x) // len(rows)), *request.x.shape[1:])
        text, has_cfg = request.conditioning.context.shape[1], len(set(rows)) > 1
        compute_options = options.get(COMPUTING, DEFAULT_COMPUTE)
        key = (choice, compute_options, shape, text, has_cfg)
        if self._decided is not None and self._decided[0] == key and self._decided[1] is sigmas:
            return self._decided[2]

        def try_out(sidecar: Sidecar, placement: Placement) -> RunInfo:
            infos = [
                sidecar.predict(self.spec, request, placement, should_cancel=interrupted)[1] for _ in range(3)
            ]
            return replace(infos[-1], step_seconds=tuple(s for info in infos for s in info.step_seconds))

        work = image_work(
            self.file,
            shape,
            text=text,
            has_cfg=has_cfg,
            steps=max(1, len(sigmas) - 1) if sigmas is not None else 1,
            weight_dtype=self.spec.weight_dtype,
        )
        decided = decide(choice, self.spec, self.file, work, try_out, compute_options=compute_options)
        self._decided = (key, sigmas, decided)
        return decided
