"""The model calls of a plain job (sampling/denoise.py) by a module, and PipeFusion's patches in it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ...engine.blocks.step_cache import ModuleCache
from ...engine.comm.collectives import broadcast
from ...engine.module_forward import ModuleForward
from ...engine.plain_calls import answers_to
from ...requests import Conditioning, Rows, SampleRequest
from ...sampling.denoise import FlowSteps
from ...sampling.patchwise import PatchSampling
from ..pipefusion.patch_flow import GUIDED, WHOLE, FlowRequest, PatchFlow, first_flowing
from .device import all_threads


class PlainForward:
    """sampling.denoise.Forward. `current`: the forward of the next call, of which all have the same model; `cache`: of
    the job, where it has one."""

    def __init__(self, current: Callable[[], ModuleForward], cache: ModuleCache | None = None) -> None:
        self._current = current
        self._cache = cache
        self.is_exact = True
        self.notes: tuple[str, ...] = ()

    @property
    def device(self) -> torch.device:
        return self._current().model.device

    def __call__(self, rows: list[Rows]) -> list[Tensor]:
        """Velocities [r, C, h, w] float32 of each entry, on every rank."""
        forward = self._current()
        if not _is_first_alone(forward):
            return answers_to(rows, forward.model.module, lambda call: forward(call, self._cache))
        if forward.layout.everyone.index == 0:
            with all_threads(self.device):
                found = answers_to(rows, forward.model.module, lambda call: forward(call, self._cache))
        else:
            found = [torch.empty_like(entry.x, dtype=torch.float32) for entry in rows]
        return [self.from_first(answer) for answer in found]

    def from_first(self, tensor: Tensor) -> Tensor:
        forward = self._current()
        return broadcast(tensor.contiguous(), 0, forward.layout.everyone, forward.traffic)

    def start_flow(self, request: SampleRequest, prompts: Sequence[Conditioning]) -> PlainFlow | None:
        """PipeFusion's patches of a job; None where all steps are of whole images."""
        forward = self._current()
        return None if forward.stages is None else PlainFlow(self, forward, request, prompts)


class PlainFlow:
    """PipeFusion's patches in a plain job (sampling.denoise.Flow), and what PatchFlow asks of it."""

    def __init__(
        self,
        plain: PlainForward,
        forward: ModuleForward,
        request: SampleRequest,
        prompts: Sequence[Conditioning],
    ) -> None:
        self._plain, self._forward, self._prompts = plain, forward, prompts
        self.request = FlowRequest(
            noise=request.noise.to(plain.device, torch.float32),
            sigmas=request.sigmas,
            sampler=request.sampler,
            seed=request.seed,
            conds=[[{}] for _ in prompts],
            classes=frozenset({"CONST"}),
        )
        self.flow = PatchFlow(forward, self)
        self.first = first_flowing(forward.layout.strategy)

    def whole(self, rows: list[Rows]) -> list[Tensor]:
        """As PlainForward's call; leaves its keys and values to patches."""
        return answers_to(rows, self._forward.model.module, self.flow.whole)

    def answers(self, wanted: tuple[bool, ...], x: Tensor, sigma: Tensor) -> list[Tensor]:
        rows = [Rows(x, sigma.expand(len(x)), prompt) for prompt in self._prompts]
        return answers_to(rows, self._forward.model.module, self.flow.compute)

    def run(self, steps: FlowSteps) -> Tensor | None:
        """Takes the patches of `steps.x` through all steps from `steps.first` on. None, with a note, where this job has
        no patches. Collective."""
        everyone = self._forward.layout.everyone
        is_first = everyone.index == 0
        owners = self.flow.find_patches() if is_first else None
        flows = torch.tensor([isinstance(owners, Tensor)], dtype=torch.uint8, device=self._plain.device)
        if not bool(self._plain.from_first(flows)):
            if isinstance(owners, str):
                self._plain.notes = (WHOLE.format(reason=owners),)
            return None
        sides = (True,) * len(self._prompts)
        latent = torch.empty_like(steps.x)
        if isinstance(owners, Tensor):
            latent = self._lead(steps, owners, sides)
        else:
            self.flow.follow(sides, steps.first, steps.on_step)
        self._plain.is_exact = self.flow.exact
        return self._plain.from_first(latent)

    def _lead(self, steps: FlowSteps, owners: Tensor, sides: tuple[bool, ...]) -> Tensor:
        def denoise(x: Tensor, sigma: Tensor) -> Tensor:
            x = steps.guidance.model_input(x, sigma)
            return steps.guidance.denoised(x, sigma, self.flow.answers(sides, x, sigma))

        self.flow.share_patches(owners)
        steps.history.share = lambda noise: noise  # this rank alone samples patches
        sampling = PatchSampling(
            steps.step,
            steps.x,
            steps.sigmas,
            steps.first,
            steps.history,
            GUIDED,
            steps.on_step,
            self.flow.patches,
            lag=self.flow.lag,
            keep=steps.keep,
        )
        self.flow.run(steps.sigmas, steps.first, steps.on_step, (sampling, denoise))
        return sampling.latent


def _is_first_alone(forward: ModuleForward) -> bool:
    """True if the first of several ranks computes and the others wait: the strategy is for one device."""
    return forward.layout.strategy.world_size < forward.layout.everyone.size
