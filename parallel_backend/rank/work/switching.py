"""Tries several strategies within a sampling job: all ranks change the forward between the same two steps."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from ...engine.comm.groups import World
from ...engine.module_forward import ModuleForward
from ...strategy import ParallelStrategy
from ...trials import TrialRun
from ...wire.heartbeat import heartbeat
from .step_boundary import StepBoundary


@dataclass(eq=False)
class Switching:
    """The trials of one job on one rank. `current`: the forward of the strategy that the next step runs under.

    `make_forward` is collective. Rank 0 decides by its clock and tells the other ranks after each step, until the
    trials are settled.
    """

    _world: World
    _trials: TrialRun
    _make_forward: Callable[[ParallelStrategy], ModuleForward]
    _on_step: StepBoundary

    def __post_init__(self) -> None:
        self.current = self._make_forward(self._trials.strategy)
        self._started = time.perf_counter()

    def leave_out(self, seconds: float) -> None:
        """Leaves these seconds of the current step out of its time: it found out how to share out foreign code."""
        self._started += seconds

    def on_step(self, i: int, denoised: Tensor, flags: int) -> None:
        """Ends a step of the job (see StepBoundary); the next one may run under another strategy."""
        number = self._trials.current
        self._take_time()
        self._on_step.strategy = number
        self._on_step(i, denoised, flags)
        if self._trials.current != number:
            self.current = self._make_forward(self._trials.strategy)
        self._started = time.perf_counter()

    def _take_time(self) -> None:
        """Records the time of the step, and follows rank 0's decision. Collective until the trials are settled."""
        trials = self._trials
        if trials.is_settled:
            trials.took(time.perf_counter() - self._started)
            return
        self._world.synchronize()  # otherwise this would measure the host only
        trials.took(time.perf_counter() - self._started)
        if self._world.control is not None:
            decided = torch.tensor([trials.current, int(trials.is_settled)], dtype=torch.int32)
            with heartbeat.inside("the agreement on a strategy", range(self._world.world_size)):
                dist.broadcast(decided, 0, group=self._world.control)
            trials.follow(int(decided[0]), bool(decided[1]))
