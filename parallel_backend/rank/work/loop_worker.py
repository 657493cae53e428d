"""ComfyUI's own loop over all ranks: the first one samples, the others join the model calls that it asks for.

So what a sampler decides by values, and the noise that it draws, exist once. Before each call and at each step boundary
the first rank says over the control group what comes; a boundary is where the sampler calls back.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...engine.blocks.step_cache import ModuleCache
from ...engine.comm.collectives import broadcast
from ...engine.comm.groups import Layouts
from ...engine.lead import all_threads
from ...engine.module_forward import ModuleForward
from ...errors import RequestError
from ...models.comfyui.loop import ComfyUILoop
from ...options import check_step_cache
from ...requests import LoopState, ModuleCall
from ...sampling.host_copy import NumbersCheck, most_lag
from ...strategy import ParallelStrategy
from ...trials import TrialRun
from ...wire.heartbeat import heartbeat
from ...wire.loop import loop_request
from ...wire.payloads import Tensors, take_loop_state
from ...wire.protocol import RankRun, SampleLoop
from ..outcome.errors import PeerFailed, is_refusal, refusing
from ..pipefusion.patch_flow import WHOLE, PatchFlow, why_whole
from ..pipefusion.patch_sampler import PatchSampler
from .run_record import run_record
from .step_boundary import StepBoundary
from .switching import Switching

if TYPE_CHECKING:
    from ...models.comfyui.model import ComfyUIModel

MOST_KEPT = 2**30  # bytes of answers that ComfyUI's process keeps of a job, for the case that ranks crash
_CALL, _STEP, _END, _FAILED, _FLOW = range(5)  # the first rank's words


def sample_loop(
    layouts: Layouts,
    model: ComfyUIModel,
    message: SampleLoop,
    tensors: Tensors,
    on_step: StepBoundary,
    forward_under: Callable[[ParallelStrategy], ModuleForward],
) -> tuple[Tensors, RankRun]:
    """Runs the job of `message` with the other ranks; the latent is the first one's. `forward_under`: collective."""
    begun, placement = time.perf_counter(), message.placement
    state = take_loop_state(tensors)
    if state is not None:
        heartbeat.steps_done(state.step)
    forward = forward_under(placement.strategy)
    sent = forward.bytes_sent
    switching: Switching[ModuleForward] | None = None
    if message.trials:
        trials = TrialRun(placement.strategy, message.trials, message.steps)
        switching = Switching(layouts.world, trials, forward_under, on_step)
    request = loop_request(tensors)
    cache: ModuleCache | None = None
    if request.cache_threshold > 0:
        check_step_cache(request.cache_threshold, placement.strategy)
        earlier = (0, 0) if state is None else (state.calls, state.reused)
        cache = ModuleCache(request.cache_threshold, *earlier)
    job = _Job(layouts, forward, switching, on_step, message.steps, state, cache)
    loop = ComfyUILoop(model, request, job.compute)
    latent = job.run(loop)
    on_step.finish()
    run = run_record(forward if switching is None else switching.current, placement, begun, sent)
    run = replace(run, model_calls=job.model_calls, inside_seconds=on_step.inside_seconds)
    run = replace(run, exact=run.exact and job.exact, notes=(*run.notes, *job.notes))
    if cache is not None:
        exact = run.exact and not cache.reused
        run = replace(run, exact=exact, model_calls=cache.calls, reused_calls=cache.reused)
    result = {"latent": latent.float(), "step_seconds": torch.tensor(on_step.seconds, dtype=torch.float64)}
    return result, run if switching is None else switching.told(run)


def _bits(sides: tuple[bool, ...]) -> int:
    return sum(is_wanted << side for side, is_wanted in enumerate(sides))


class _Answers:
    """What the model calls of a job gave: those before a crash, again in their order, and then those made since.

    `count`: of calls that were asked for so far.
    """

    def __init__(self, state: LoopState | None) -> None:
        self._earlier = None if state is None else state.answers
        self._begun = 0 if state is None else len(state.answers)  # number of the first one in `_since`
        self._since: list[Tensor] = []
        self._shape = None if state is None else state.answers.shape[1:]
        self._bytes = 0 if state is None else state.answers.nbytes
        self.count = 0

    def replayed(self, wanted: tuple[bool, ...], like: Tensor) -> list[Tensor] | None:
        """Those to the next call, as it gave them; None where it was not made before. Raises RequestError for a record
        of another job."""
        self.count += 1
        if self._earlier is None or self.count > len(self._earlier):
            return None
        found = self._earlier[self.count - 1]
        if found.shape != (sum(wanted), *like.shape):
            raise RequestError(
                f"what the job resumes from has answers of {list(found.shape)} to a model call of {list(like.shape)}."
            )
        mine = iter(found.to(like.device, copy=True))
        return [next(mine) if is_wanted else torch.zeros_like(like) for is_wanted in wanted]

    def add(self, wanted: tuple[bool, ...], found: list[Tensor]) -> None:
        """Where there is no more room, a job goes on from what was taken before."""
        kept = torch.stack([a for a, is_wanted in zip(found, wanted, strict=True) if is_wanted]).float()
        self._shape = self._shape or kept.shape
        self._bytes += kept.nbytes
        if self._bytes > MOST_KEPT or kept.shape != self._shape:  # which no sampler of ComfyUI's has
            self._since, self._bytes = [], MOST_KEPT + 1
        else:
            self._since.append(kept)

    def __len__(self) -> int:
        """Of those that were not taken."""
        return len(self._since)

    def take(self, step: int, calls: int, reused: int) -> LoopState:
        """Those since the last time, which end step number `step`. `calls`, `reused`: as in LoopState."""
        since, self._since = self._since, []
        state = LoopState(step, self._begun, torch.stack(since), calls, reused)
        self._begun += len(since)
        return state


class _Job:
    """One job on one rank, of so many steps. `forward`: by which network calls are made, where `switching` does not
    change it; `state`: what the job goes on from; `cache`: of its network calls."""

    def __init__(
        self,
        layouts: Layouts,
        forward: ModuleForward,
        switching: Switching[ModuleForward] | None,
        on_step: StepBoundary,
        steps: int,
        state: LoopState | None,
        cache: ModuleCache | None,
    ) -> None:
        self._world = layouts.world
        self._cache = cache
        self._everyone, self._traffic = layouts.everyone, layouts.traffic
        self._own_forward = forward
        self._switching = switching
        self._on_step = on_step
        self._end_step = on_step if switching is None else switching.on_step
        self._steps = steps
        self._answers = _Answers(state)
        self._steps_done = 0 if state is None else state.step
        self._met = 0  # boundaries that the sampler came to, those before a crash again
        self._answering = False  # a call that the hook has asked for
        self._together = False  # in what all ranks do, where an error on one is no news to the others
        self._check_numbers = NumbersCheck(most_lag(layouts.world.device))
        self._flow: PatchFlow | None = None  # of a job whose patches can flow
        self._sides: tuple[bool, ...] = ()  # that the last call was of
        self._flowed = False
        self.notes: list[str] = []

    @property
    def model_calls(self) -> int:
        """Those of the whole job, as the first rank counts them; those of patches once for all."""
        return self._answers.count

    @property
    def exact(self) -> bool:
        """Whether no patch attended to keys of the step before."""
        return self._flow is None or self._flow.exact

    def compute(self, call: ModuleCall) -> Any:
        """The network's answer to a call, the same on every rank that makes it."""
        if not self._answering:
            raise RequestError(
                "This ComfyUI makes model calls in a way that the ranks do not know; use stock KSampler behind the "
                "parallel model, or another version of ComfyUI."
            )
        if self._flow is None:
            return self._forward(call, self._cache)
        return self._flow.compute(call) if self._flowed else self._flow.whole(call)

    def run(self, loop: ComfyUILoop) -> Tensor:
        """The latent; on other ranks than the first an empty one."""
        if self._own_forward.stages is not None:
            reason = why_whole(loop.request, self._own_forward.layout.strategy)
            self._flow = None if reason else PatchFlow(self._own_forward, loop)
            self.notes += [WHOLE.format(reason=reason)] if reason else []
        if self._world.rank:
            self._follow(loop)
            return torch.empty(0)
        try:
            latent = self._sample(loop)
            self._check_numbers.finish()
        except Exception as error:
            if self._together:
                raise
            self._say(_FAILED)
            if not is_refusal(error):
                raise
            raise RequestError(
                f"The sampler {loop.sampler} cannot compute with what it was given ({type(error).__name__}: {error}); "
                f"stock KSampler should say so too."
            ) from error
        self._say(_END)
        return latent

    # The first rank.

    def _sample(self, loop: ComfyUILoop) -> Tensor:
        def answers(*asked: Any) -> list[Tensor]:
            return self._lead(loop, *asked)

        flow = self._flow
        if flow is None:
            return loop.sample(answers, self._step)
        whole = flow.whole_steps if not self._steps_done else max(flow.whole_steps, self._steps_done + 1)
        sampler = PatchSampler(flow, whole, self._step, self._begin_patches, self._on_step)
        latent = loop.sample(answers, self._step, sampler)
        self._together = False
        self._answers.count += sampler.calls
        if self._flowed:
            self._check_numbers(latent, f"in one of the steps {whole + 1} to {self._steps}")
        elif sampler.why_whole:
            self.notes.append(WHOLE.format(reason=sampler.why_whole))
        return latent

    def _begin_patches(self) -> None:
        self._say(_FLOW, _bits(self._sides))
        self._together = self._answering = self._flowed = True

    def _lead(self, loop: ComfyUILoop, wanted: tuple[bool, ...], x: Tensor, sigma: Tensor) -> list[Tensor]:
        if self._flow is not None and self._flowed:
            return self._flow.answers(wanted, x, sigma)
        self._sides = wanted
        recorded = self._answers.replayed(wanted, x)
        if recorded is not None:
            return recorded
        if self._is_alone:
            with all_threads(self._world.device):
                found = self._compute_answers(loop, wanted, x, sigma)
        else:
            self._check(loop, x, sigma)
            self._say(_CALL, _bits(wanted))
            self._together = True
            self._send(x, sigma)
            found = self._compute_answers(loop, wanted, x, sigma)
            self._together = False
        if self._on_step.sends_states:
            self._answers.add(wanted, found)
        return found

    def _step(self, denoised: Tensor) -> None:
        """The sampler called back."""
        self._met += 1
        step = self._met
        if step <= self._steps_done:
            return
        self._check_numbers(denoised, f"in step {step} of {self._steps}")
        if len(self._answers):
            cache = self._cache
            counts = (0, 0) if cache is None else (cache.calls, cache.reused)
            self._on_step.keep(lambda: self._answers.take(step, *counts))
        self._say(_STEP)
        self._together = True
        self._end_step(step - 1, denoised)
        self._steps_done, self._together = step, False

    def _check(self, loop: ComfyUILoop, x: Tensor, sigma: Tensor) -> None:
        """Raises RequestError for what the other ranks do not expect."""
        for found, expected in zip((x, sigma), loop.new_call(), strict=True):
            if (found.shape, found.dtype) != (expected.shape, expected.dtype):
                raise RequestError(
                    f"this sampler asks the model for {list(found.shape)} {found.dtype}; a sampler that asks for "
                    f"another size than the latent's runs with stock KSampler only."
                )

    # The others.

    def _follow(self, loop: ComfyUILoop) -> None:
        nothing = torch.empty(0)
        while (heard := self._hear())[0] != _END:
            word, sides = heard
            if word == _FAILED:
                raise PeerFailed("the first rank, which samples, failed")
            if word == _STEP:
                self._end_step(self._steps_done, nothing)
                self._steps_done += 1
                continue
            wanted = (bool(sides & 1), bool(sides & 2))
            if word == _FLOW:
                assert self._flow is not None, "all ranks know whether patches can flow"
                self._answering = self._flowed = True
                self._flow.follow(wanted, self._steps_done, self._on_step)
                continue
            x, sigma = loop.new_call()
            self._send(x, sigma)
            self._compute_answers(loop, wanted, x, sigma)

    # All.

    @property
    def _forward(self) -> ModuleForward:
        return self._own_forward if self._switching is None else self._switching.current

    @property
    def _is_alone(self) -> bool:
        """Whether the first rank computes without the others."""
        return self._forward.layout.strategy.world_size < self._world.world_size

    def _compute_answers(
        self, loop: ComfyUILoop, wanted: tuple[bool, ...], x: Tensor, sigma: Tensor
    ) -> list[Tensor]:
        self._answering = True
        with refusing(type(self._forward.model.module).__name__, self._traffic):
            found = loop.answers(wanted, x, sigma)
        self._answering = False
        return found

    def _send(self, *tensors: Tensor) -> None:
        """The first rank's, to all; copied where they are not in one piece."""
        for tensor in tensors:
            broadcast(tensor.contiguous(), 0, self._everyone, self._traffic)

    def _say(self, word: int, sides: int = 0) -> None:
        self._exchange(torch.tensor([word, sides], dtype=torch.int32))

    def _hear(self) -> tuple[int, int]:
        heard = torch.empty(2, dtype=torch.int32)
        self._exchange(heard)
        word, sides = heard.tolist()
        return word, sides

    def _exchange(self, words: Tensor) -> None:
        if self._world.control is None:
            return
        with heartbeat.inside("the wait for the next model call", range(self._world.world_size)):
            dist.broadcast(words, 0, group=self._world.control)
