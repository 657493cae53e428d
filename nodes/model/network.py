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
from ...parallel_backend.planner.rules import StrategySettings
from ...parallel_backend.requests import (
    Conditioning,
    ModelSpec,
    Placement,
    PredictRequest,
    RunInfo,
    check_numbers,
    is_finite,
)
from ...parallel_backend.sidecar.sidecar import Sidecar
from ...parallel_backend.wire.payloads import check_inputs
from ..host.calls import RunRecord, interrupted, report_progress
from ..host.memory import size_on, watch
from .inputs import take_extras
from .lora import FileParameters
from .options import RECORD, SETTINGS, patches_of
from .plans import RunPlans
from .run_file import RunFile
from .unsupported import refuse_effects


class _Part(nn.Module):
    """A node on the way to a parameter; numbered ones answer to an index, as lists of blocks do."""

    def __getitem__(self, index: int) -> nn.Module:
        return self._modules[str(index)]


class StepwiseNetwork(nn.Module):
    """Stands where ComfyUI expects the network: the same call, answered by the ranks.

    `shapes`: of the parameters that ComfyUI's own has, by name. They lie on the meta device: no memory, but LoRA
    loaders find their targets, so that a LoRA is noticed instead of dropped. `file_parameters`: the same in the file.
    """

    own_loop = True  # the ranks run the pack's, for samplers that it has (own_loop.py)
    record: RunRecord | None = None  # of a run whose sampler brings none (patcher.py)

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
        self.run_file = RunFile(spec.path)
        self.file_parameters = file_parameters
        self.dtype = torch.float32
        watch(self, spec)
        self.plans = RunPlans(spec, file)
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

    def begin_run(self, threshold: float) -> None:
        """The ranks have a step cache in their own loop only."""
        self.run_file.begin()

    def end_run(self) -> None:
        self.record = None

    def size_on(self, device: torch.device, settings: StrategySettings) -> int:
        """Bytes of its weights on one of ComfyUI's devices, while ranks hold them."""
        return size_on(device, self.spec, self.file, settings, self.plans.latest)

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
        conditioning = Conditioning(context, y, None if guidance is None else guidance.float())
        request = PredictRequest(x.float(), timestep.float(), conditioning)
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
        refuse_effects(options, others, attention="Parallel Flux Loader's input attention has that")
        request = replace(request, extras=extras)
        record: RunRecord | None = options.get(RECORD, self.record)

        patches = patches_of(options)

        def call(sidecar: Sidecar, placement: Placement) -> tuple[Tensor, RunInfo]:
            return sidecar.predict(
                self.spec,
                request,
                placement,
                on_phase=report_progress,
                should_cancel=interrupted,
                patches=patches,
                file=self.run_file.identity,
            )

        references = [latent.shape for latent in extras.references]
        velocity, plan, info = self.plans.run(
            options, request.x.shape, context.shape[1], call, references=references
        )
        if not is_finite(velocity):
            check_numbers(velocity, f"at sigma {request.sigma.max().item():.4g}", given=(request.x,))
        if record is not None:
            record.add_run(plan, info)
        return velocity.to(x.device, x.dtype)

    def _compute_dtype(self, settings: StrategySettings) -> torch.dtype:
        on_cpu = is_cpu(resolve_devices(settings.devices))
        return getattr(torch, Dtypes.of(self.spec.weight_dtype, self.file.dtype, on_cpu).compute)
