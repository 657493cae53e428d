"""Jobs of ComfyUI's own loop on a stand-in for a GPU (dispatch_counter.py), as a rank runs them and as stock does."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

import loop_jobs
from dispatch_counter import CPU, DEVICE, counted, world_of_one_process
from loop_ranks import ParentOfRankZero
from module_devices import comfyui_on_the_device
from parallel_backend.engine.comm.groups import Layouts
from parallel_backend.engine.module_forward import ModuleForward, make_module_forward
from parallel_backend.layout import split_sizes
from parallel_backend.models.comfyui.load import load
from parallel_backend.models.comfyui.model import ComfyUIModel
from parallel_backend.models.comfyui.placing import place
from parallel_backend.rank.pipefusion import patch_flow
from parallel_backend.rank.work import loop_worker
from parallel_backend.rank.work.loop_worker import sample_loop
from parallel_backend.rank.work.step_boundary import StepBoundary
from parallel_backend.requests import LoopRequest, ModelSpec, Placement
from parallel_backend.sampling.image_patches import ElementPatches
from parallel_backend.strategy import ParallelStrategy
from parallel_backend.wire.arguments import map_tensors
from parallel_backend.wire.loop import loop_tensors
from parallel_backend.wire.protocol import SampleLoop


@dataclass
class LoopFound:
    """`syncs`: how often the host waited for the device; `own`: of these, where in the pack; `calls`: the arguments by
    name of the network's calls; `latent`, `previews`: what the job gave, and showed of its steps."""

    syncs: int
    own: list[str]
    latent: Tensor
    calls: list[dict[str, Any]] = field(default_factory=list)
    previews: list[Tensor] = field(default_factory=list)


class _EvenPatches(ElementPatches):
    """Of as many elements each: a stand-in has no numbers to count them by."""

    def __init__(self, owners: Tensor, shape: torch.Size, count: int) -> None:
        super().__init__(owners, shape, count)
        self._sizes = split_sizes(shape.numel(), count)


class DeviceLoop:
    """Over one model, which a rank holds whole."""

    def __init__(self, spec: ModelSpec) -> None:
        self.model: ComfyUIModel = load(spec, CPU)
        place(self.model.patcher.model, DEVICE, {}, None)
        self.model.device = self.model.patcher.load_device = self.model.patcher.model.device = DEVICE

    def on_rank(
        self,
        rank: int,
        strategy: ParallelStrategy,
        job: LoopRequest,
        heard: Iterable[tuple[int, int]] = (),
    ) -> LoopFound:
        """`heard`: what a rank after the first one is told."""
        calls: list[dict[str, Any]] = []
        words, parent, steps = iter(heard), ParentOfRankZero(), len(job.sigmas) - 1
        with world_of_one_process(rank, strategy.world_size) as world, ExitStack() as inside:
            layouts = Layouts(world)
            forward = make_module_forward(self.model, layouts, Placement(strategy))
            inside.enter_context(patch.object(loop_worker._Job, "_hear", lambda job: next(words)))
            inside.enter_context(patch.object(patch_flow, "ElementPatches", _EvenPatches))
            inside.enter_context(_noting(forward, calls))
            boundary = StepBoundary(
                parent,
                epoch=0,
                request=0,
                rank=rank,
                control=world.control,
                device=DEVICE,
                steps=steps,
                previews=True,
                states=True,
            )
            asked = SampleLoop(Placement(strategy), steps, previews=True, states=True)
            inside.enter_context(comfyui_on_the_device())
            with torch.inference_mode(), counted() as counter:
                found, _ = sample_loop(
                    layouts, self.model, asked, loop_tensors(job), boundary, lambda strategy: forward
                )
        return LoopFound(
            counter.counts.host_syncs, counter.own_syncs, found["latent"], calls, parent.previews
        )

    def stock(self, job: LoopRequest) -> LoopFound:
        """ComfyUI's own guider and sampler alone."""
        there = LoopRequest(**map_tensors(vars(job), lambda tensor: tensor.to(DEVICE)))
        with ExitStack() as inside:
            inside.enter_context(world_of_one_process(0, 1))
            inside.enter_context(patch.object(loop_jobs, "stock_model", lambda path: self.model))
            inside.enter_context(comfyui_on_the_device())
            with counted() as counter:
                latent = loop_jobs.stock_latent("", there)
        return LoopFound(counter.counts.host_syncs, counter.own_syncs, latent)


def _noting(forward: ModuleForward, calls: list[dict[str, Any]]) -> Any:
    module = forward.model.module
    computed = module.forward

    def noted(*args: Any, **kwargs: Any) -> Any:
        calls.append(kwargs)
        return computed(*args, **kwargs)

    return patch.object(module, "forward", noted)
