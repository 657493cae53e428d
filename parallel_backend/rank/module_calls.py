"""Calls of a ComfyUI module that its own loop makes one by one, and what a rank keeps of them for the next one."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from ..engine.comm.groups import World
from ..engine.comm.traffic_counter import Traffic
from ..models.comfyui.patches import leaves_something
from ..options import check_step_cache
from ..requests import ModuleCall, Reuse
from ..strategy import ParallelStrategy
from ..wire.arguments import pack_arguments
from ..wire.payloads import Tensors
from ..wire.protocol import Call, RankRun
from .kept_arguments import KeptArguments
from .outcome.errors import refusing
from .work.run_record import as_one_step, run_record

if TYPE_CHECKING:  # imported when they are first needed: they take seconds
    from ..engine.blocks.step_cache import ModuleCache
    from ..engine.module_forward import ModuleForward


class ModuleCalls:
    """Of one rank. All ranks make the same calls, and decide together what a step cache leaves out; what one of them no
    longer has, none uses."""

    def __init__(self, world: World, traffic: Traffic) -> None:
        self._world = world
        self._traffic = traffic
        self._arguments = KeptArguments(world.device)
        self._run = 0
        self._cache: ModuleCache | None = None  # of that run

    def clear(self) -> None:
        self._arguments.clear()
        self.end_run()

    def end_run(self) -> None:
        """Forgets what a step cache keeps. A run that goes on computes its next calls whole, on all ranks."""
        self._run, self._cache = 0, None

    def make(
        self, message: Call, tensors: Tensors, make_forward: Callable[[], ModuleForward]
    ) -> tuple[Tensors, RankRun]:
        """One call: its answer on the rank's device, the same on every rank that makes it, empty on one that does not.
        `make_forward`: collective."""
        from ..engine.lead import all_threads

        begun, placement = time.perf_counter(), message.placement
        args, kwargs = self._arguments.take(tensors, message.forget)
        forward = make_forward()
        cache = self._cache_for(message.reuse, placement.strategy)
        sent, alone = forward.bytes_sent, placement.strategy.world_size < self._world.world_size
        # The first rank computes, and nobody else is asked for the answer; but what a run leaves, all have alike.
        if alone and self._world.rank > 0 and not leaves_something(kwargs):
            return {}, run_record(forward, placement, begun, sent)
        call = ModuleCall(args, kwargs, message.rows, message.tokens, message.method)
        calls, reused = (0, 0) if cache is None else (cache.calls, cache.reused)
        with (
            all_threads(self._world.device) if alone else nullcontext(),
            refusing(type(forward.model.module).__name__, self._traffic),
        ):
            if cache is None or message.reuse is None:
                answer = forward(call)
            else:
                prompts = (message.reuse.like,)
                answer = forward(replace(call, prompts=prompts), cache)
                if message.reuse.last:
                    cache.forget(prompts)
        packed = pack_arguments(answer, "the model's answer")
        if self._world.device.type == "cuda":  # what failed there is told here, and the time is the call's
            torch.cuda.synchronize(self._world.device)
        run = as_one_step(run_record(forward, placement, begun, sent))
        if cache is not None:
            calls, reused = cache.calls - calls, cache.reused - reused
            run = replace(run, exact=run.exact and not reused, model_calls=calls, reused_calls=reused)
        return packed, run

    def _cache_for(self, reuse: Reuse | None, strategy: ParallelStrategy) -> ModuleCache | None:
        """With the call's threshold; None for one that is computed whole and leaves nothing."""
        from ..engine.blocks.step_cache import ModuleCache

        if reuse is None or reuse.run != self._run:
            self.end_run()
        if reuse is None or not reuse.like:
            return None
        check_step_cache(reuse.threshold, strategy)
        if self._cache is None:
            self._run, self._cache = reuse.run, ModuleCache(reuse.threshold)
        self._cache.threshold = reuse.threshold
        return self._cache
