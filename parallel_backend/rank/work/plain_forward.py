"""The model calls of a plain job (sampling/denoise.py) by a module, and PipeFusion's patches in it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...engine.comm.collectives import broadcast
from ...engine.plain_calls import answers_to
from ...requests import Conditioning, Rows, SampleRequest

if TYPE_CHECKING:  # imported when they are first needed: they take seconds
    from ...engine.module_forward import ModuleForward
    from ..pipefusion.plain_flow import PlainFlow


class PlainForward:
    """sampling.denoise.Forward."""

    def __init__(self, forward: ModuleForward) -> None:
        self._forward = forward
        self.is_exact = True
        self.notes: tuple[str, ...] = ()

    @property
    def device(self) -> torch.device:
        return self._forward.model.device

    def __call__(self, rows: list[Rows]) -> list[Tensor]:
        """Velocities [r, C, h, w] float32 of each entry, on every rank."""
        return answers_to(rows, self._forward.model.module, self._forward)

    def from_first(self, tensor: Tensor) -> Tensor:
        return broadcast(tensor.contiguous(), 0, self._forward.layout.everyone, self._forward.traffic)

    def start_flow(self, request: SampleRequest, prompts: Sequence[Conditioning]) -> PlainFlow | None:
        """PipeFusion's patches of a job; None where all steps are of whole images."""
        if self._forward.stages is None:
            return None
        from ..pipefusion.plain_flow import PlainFlow

        return PlainFlow(self, self._forward, request, prompts)
