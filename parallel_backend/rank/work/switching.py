"""A sampling job that tries strategies on its way: its forward changes between steps, on all ranks alike."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from ...engine.comm.groups import World
from ...engine.module_forward import ModuleForward
from ...strategy import ParallelStrategy
from ...trials import TrialRun
from ...wire.heartbeat import heartbeat
from ...wire.protocol import RankRun
from .step_boundary import StepBoundary


class Switching:
    """`current`: the forward of the strategy that the next step runs under.

    `make_forward` is collective. Rank 0's clock decides, and the others learn of it after each step until all is
    settled.
    """

    def __init__(
        self,
        world: World,
        trials: TrialRun,
        make_forward: Callable[[ParallelStrategy], ModuleForward],
        on_step: StepBoundary,
    ) -> None:
        self._world = world
        self._trials = trials
        self._make_forward = make_forward
        self._on_step = on_step
        self.current = make_forward(trials.strategy)
        self._started = time.perf_counter()

    def on_step(self, i: int, denoised: Tensor) -> None:
        """The step boundary of the job; after it the next step may run under another strategy."""
        number = self._trials.current
        self._take_time()
        self._on_step.strategy = number
        self._on_step(i, denoised)
        if self._trials.current != number:
            self.current = self._make_forward(self._trials.strategy)
        self._started = time.perf_counter()

    def with_trials(self, run: RankRun) -> RankRun:
        """`run` as it was: by the strategy that it ended under."""
        return replace(run, strategy=self._trials.strategy, trials=self._trials.results)

    def _take_time(self) -> None:
        """Collective until all is settled."""
        trials = self._trials
        if trials.is_settled:
            trials.took(time.perf_counter() - self._started)
            return
        if self._world.device.type == "cuda":
            torch.cuda.synchronize(self._world.device)  # else the time would be the host's
        trials.took(time.perf_counter() - self._started)
        if self._world.control is not None:
            decided = torch.tensor([trials.current, int(trials.is_settled)], dtype=torch.int32)
            with heartbeat.inside("the agreement on a strategy", range(self._world.world_size)):
                dist.broadcast(decided, 0, group=self._world.control)
            trials.follow(int(decided[0]), bool(decided[1]))
