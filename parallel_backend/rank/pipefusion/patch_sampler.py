"""The first rank's sampler where patches flow, of the form of ComfyUI's: whole images first, and then patches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from ...sampling.patchwise import OnPatchStep, PatchSampling
from ...sampling.samplers import Sigmas, run
from .patch_flow import GUIDED, PatchFlow, calls_from, history_of, step_of


class PatchSampler:
    """`whole`: steps of whole images; `end_step(denoised)`: after each; `begin`: has the other ranks join what the
    first one does with patches; `on_step`: the boundary between their steps."""

    def __init__(
        self,
        flow: PatchFlow,
        whole: int,
        end_step: Callable[[Tensor], None],
        begin: Callable[[], None],
        on_step: OnPatchStep,
    ) -> None:
        self._flow = flow
        self._whole = whole
        self._end_step = end_step
        self._begin = begin
        self._on_step = on_step
        self.calls = 0  # of the model by patches, counted once for all patches
        self.why_whole = ""  # why no patch flowed

    def __call__(self, model: Any, x: Tensor, sigmas: Tensor, *, extra_args: Any, **others: Any) -> Tensor:
        """As ComfyUI's sampler of the job's name, whose arithmetic its steps have (sampling/samplers.py)."""
        request = self._flow.request
        step, levels, ones = step_of(request), Sigmas(sigmas, x.device), x.new_ones(len(x))
        history, steps = history_of(request, x.device), len(sigmas) - 1

        def denoise(x: Tensor, sigma: Tensor) -> Tensor:
            denoised: Tensor = model(x, sigma * ones, **extra_args)
            return denoised

        for i in range(steps):
            owners = self._flow.find_patches() if i == self._whole else ""
            if isinstance(owners, str):
                self.why_whole = self.why_whole or owners
            else:
                self._begin()
                self._flow.share_patches(owners)
                patches = PatchSampling(
                    step, x, levels, i, history, GUIDED, self._on_step, self._flow.patches, lag=self._flow.lag
                )
                self._flow.run(levels, i, self._on_step, (patches, denoise))
                self.calls = len(calls_from(step, levels, i))
                return patches.latent
            x, denoised = run(step(x, levels, i, history), denoise)
            self._end_step(denoised)
        return x
