"""PipeFusion's patches in a plain job: the first rank samples them, the others follow, and its latent goes to all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from ...engine.module_forward import ModuleForward
from ...engine.plain_calls import answers_to
from ...requests import Conditioning, Rows, SampleRequest
from ...sampling.denoise import FlowSteps
from ...sampling.patchwise import PatchSampling
from .patch_flow import WHOLE, FlowRequest, PatchFlow, first_flowing


class PlainCalls(Protocol):
    """What a flow tells the calls of its job (rank/work/plain_forward.py)."""

    is_exact: bool
    notes: tuple[str, ...]

    @property
    def device(self) -> torch.device: ...
    def from_first(self, tensor: Tensor) -> Tensor: ...


class PlainFlow:
    """PipeFusion's patches in a plain job (sampling.denoise.Flow), and what PatchFlow asks of it."""

    def __init__(
        self,
        plain: PlainCalls,
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
            steps.on_step,
            self.flow.patches,
        )
        self.flow.run(steps.sigmas, steps.first, steps.on_step, (sampling, denoise))
        return sampling.latent
