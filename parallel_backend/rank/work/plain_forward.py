"""The model calls of a plain job (sampling/denoise.py) by a module, and PipeFusion's patches in it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...engine.comm.collectives import broadcast
from ...engine.plain_calls import answers_to
from ...requests import Conditioning, Rows, SampleRequest
from .device import all_threads

if TYPE_CHECKING:  # imported when they are first needed: they take seconds
    from ...engine.blocks.step_cache import ModuleCache
    from ...engine.module_forward import ModuleForward
    from ..pipefusion.plain_flow import PlainFlow


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
        if forward.stages is None:
            return None
        from ..pipefusion.plain_flow import PlainFlow

        return PlainFlow(self, forward, request, prompts)


def _is_first_alone(forward: ModuleForward) -> bool:
    """True if the first of several ranks computes and the others wait: the strategy is for one device."""
    return forward.layout.strategy.world_size < forward.layout.everyone.size
