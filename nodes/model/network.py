"""A stock MODEL without weights: ComfyUI runs the loop, each model call goes to the ranks.

What such a call cannot honour yet is refused by the name of its effect, never dropped.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import comfy.model_base
import comfy.model_management
import comfy.model_patcher
import comfy.patcher_extension
import torch
from torch import Tensor, nn

from ...parallel_backend.devices import is_cpu, resolve_devices
from ...parallel_backend.models.dtypes import Dtypes
from ...parallel_backend.models.model_file import ModelFile
from ...parallel_backend.options import DEFAULT_COMPUTE, ComputeOptions
from ...parallel_backend.planner.decide import ExecutionPlan, job_from_latent
from ...parallel_backend.planner.job_models import CheckpointModel
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
from ...parallel_backend.wire.payloads import check_inputs
from ...parallel_backend.wire.weight_patches import NO_PATCHES
from ..host.calls import RunRecord, interrupted, plan_job, ranks_for, report_progress
from ..host.memory import size_on, watch
from .inputs import take_extras
from .lora import FileParameters
from .patcher import COMPUTE_OPTIONS, PATCHES, StepwisePatcher
from .unsupported import refuse_effects

# Keys under which the MODEL's transformer_options carry what belongs to this pack.
SETTINGS, RECORD = "parallel_strategy", "parallel_record"


def make_stepwise_model(
    model: comfy.model_base.BaseModel,
    network: StepwiseNetwork,
    settings: StrategySettings,
    compute_options: ComputeOptions,
) -> comfy.model_patcher.ModelPatcher:
    """The MODEL of `network`, which takes the place of the one that `model` lacks. Starts nothing: ranks start with the
    first sampling."""
    model.diffusion_model = network
    patcher = StepwisePatcher(
        model,
        load_device=comfy.model_management.get_torch_device(),
        offload_device=comfy.model_management.unet_offload_device(),
    )
    patcher.model_options["transformer_options"] |= {SETTINGS: settings, COMPUTE_OPTIONS: compute_options}
    return patcher


class _Part(nn.Module):
    """A node on the way to a parameter; numbered ones answer to an index, as lists of blocks do."""

    def __getitem__(self, index: int) -> nn.Module:
        return self._modules[str(index)]


class StepwiseNetwork(nn.Module):
    """Stands where ComfyUI expects the network: the same call, answered by the ranks.

    `shapes`: of the parameters that ComfyUI's own has, by name. They lie on the meta device: no memory, but LoRA
    loaders find their targets, so that a LoRA is noticed instead of dropped. `file_parameters`: the same in the file.
    """

    def __init__(
        self,
        spec: ModelSpec,
        file: ModelFile,
        file_parameters: FileParameters,
        shapes: Mapping[str, tuple[int, ...]],
    ) -> None:
        super().__init__()
        self.spec = spec
        self.file = file
        self.file_parameters = file_parameters
        self.dtype = torch.float32
        watch(self, spec)
        # Its key, the run's sigmas, and what runs.
        self._planned: tuple[tuple, Tensor | None, ExecutionPlan] | None = None
        for key, shape in shapes.items():
            *path, name = key.split(".")
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
        return size_on(device, self.file, None if self._planned is None else self._planned[2])

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
        options = transformer_options or {}  # wrappers of other packs may leave out what has a default
        if y is None:
            y = x.new_zeros(len(x), self.file.pooled_dim)
        conditioning = Conditioning(
            context.cpu(), y.cpu(), None if guidance is None else guidance.float().cpu()
        )
        request = PredictRequest(x.float().cpu(), timestep.float().cpu(), conditioning)
        check_inputs(request, self.file.inputs)
        extras = take_extras(
            x,
            ref_latents,
            control,
            others,
            self.file.block_counts,
            self._compute_dtype(options.get(SETTINGS, StrategySettings())),
            options.get("rope_options"),
        )
        refuse_effects(options, others)
        request = replace(request, extras=extras)
        record: RunRecord | None = options.get(RECORD)
        plan = self._plan(request, options)
        patches = options.get(PATCHES, NO_PATCHES)
        compute_options = options.get(COMPUTE_OPTIONS, DEFAULT_COMPUTE)
        with ranks_for(plan.decision, plan.devices, compute_options) as (sidecar, placement):
            velocity, info = sidecar.predict(
                self.spec,
                request,
                placement,
                on_phase=report_progress,
                should_cancel=interrupted,
                patches=patches,
            )
        if torch.isfinite(request.x).all():
            check_numbers(velocity, f"at sigma {request.sigma.max().item():.4g}")
        if record is not None:
            record.add_run(plan, info)
        return velocity.to(x.device, x.dtype)

    def _compute_dtype(self, settings: StrategySettings) -> torch.dtype:
        on_cpu = is_cpu(resolve_devices(settings.devices))
        return getattr(torch, Dtypes.of(self.spec.weight_dtype, self.file.dtype, on_cpu).compute)

    def _plan(self, request: PredictRequest, options: dict) -> ExecutionPlan:
        """Once for all like calls of a sampling run: what is measured meanwhile must not change it half-way."""
        rows = options.get("cond_or_uncond", [0])
        settings, sigmas = options.get(SETTINGS, StrategySettings()), options.get("sample_sigmas")
        model = CheckpointModel(
            self.file, self.spec.weight_dtype, options.get(COMPUTE_OPTIONS, DEFAULT_COMPUTE)
        )
        job = job_from_latent(
            model,
            (max(1, len(request.x) // len(rows)), *request.x.shape[1:]),
            text=request.conditioning.context.shape[1],
            has_cfg=len(set(rows)) > 1,
            steps=max(1, len(sigmas) - 1) if sigmas is not None else 1,
        )
        key = (settings, job)
        if self._planned is not None and self._planned[0] == key and self._planned[1] is sigmas:
            return self._planned[2]

        def try_out(sidecar: Sidecar, placement: Placement) -> RunInfo:
            infos = [
                sidecar.predict(
                    self.spec, request, placement, on_phase=report_progress, should_cancel=interrupted
                )[1]
                for _ in range(3)
            ]
            return replace(infos[-1], step_seconds=tuple(s for info in infos for s in info.step_seconds))

        plan = plan_job(settings, job, try_out)
        self._planned = (key, sigmas, plan)
        return plan
