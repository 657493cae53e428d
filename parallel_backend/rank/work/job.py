"""Jobs in a rank: every rank runs ComfyUI's own guider, wrappers and sampler in step, over the model that it holds."""

from __future__ import annotations

import contextlib
import io
import random
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy
import torch
from torch import Tensor

from ...engine.blocks.step_cache import ModuleCache
from ...engine.comm.groups import Layouts
from ...engine.module_forward import ModuleForward
from ...errors import Cancelled, ParallelError, RequestError
from ...job.payload import Head, ProcessFacts, SamplerRun
from ...job.pickling import PATCHER_STATE
from ...job.prints import OTHER_WEIGHTS, differing
from ...job.reducers import RankObjects
from ...job.restore import Replaced, make_changes, restored, set_replaced
from ...job.unpickling import unpack_facts, unpack_payload, unpickle_job
from ...models.comfyui.attention_router import is_attention, reroute, routed_functions
from ...models.comfyui.jobs.packages import Packages, quiet_server
from ...models.comfyui.jobs.patchers import local_patcher, other_patcher, root_patcher
from ...models.comfyui.jobs.samplers import run_guider, sampler_of
from ...strategy import ParallelStrategy
from ...trials import TrialRun
from ...wire.heartbeat import heartbeat
from ...wire.payloads import Tensors, take_loop_state
from ...wire.protocol import RankRun, RunJob
from ..outcome.agreement import RanksApart, agree
from ..outcome.errors import is_device_failure, is_out_of_memory
from ..pipefusion.job_flow import JobFlow
from ..pipefusion.patch_flow import WHOLE
from .answers import Answers
from .call_mode import NetworkState, foreign_code
from .meeting import ModuleMeeting, lead_calls
from .run_record import run_record
from .step_boundary import StepBoundary
from .switching import Switching

if TYPE_CHECKING:
    from ...models.comfyui.model import ComfyUIModel


_SHARDED = (
    "A node has changed the weight {name}, which shard_weights cannot share out; set shard_weights to off."
)


class _JobModel:
    """A held model as jobs need it: its patcher, and how it was loaded."""

    def __init__(self, model: ComfyUIModel) -> None:
        self.patcher = root_patcher(model)
        self.is_sharded = model.byte_sharding is not None
        weights: Any = model.weights
        self.originals: Mapping[str, Tensor] = weights.originals()
        self.state = NetworkState(self.base.diffusion_model, model.regions)
        # ComfyUI takes a model whose patcher is gone for a leak, and collects all garbage.
        self.last_patcher: object = None

    @property
    def base(self) -> Any:
        return self.patcher.model

    def find(self, word: tuple[str, ...]) -> Any:
        """Finds what a pickle names."""
        kind = word[0]
        if kind == "base":
            return self.base
        if kind == "module":
            return self.base.get_submodule(word[1])
        if kind != "param":
            raise RequestError(f"A job names {word}, which no device has.")
        path, _, name = word[1].rpartition(".")
        owner = self.base.get_submodule(path)
        return owner._parameters[name] if name in owner._parameters else owner._buffers[name]


class Jobs:
    """The state that a rank keeps from job to job."""

    def __init__(self, layouts: Layouts) -> None:
        self._layouts = layouts
        self._models: weakref.WeakKeyDictionary[ComfyUIModel, _JobModel] = weakref.WeakKeyDictionary()
        self._tensors: dict[int, Tensor] = {}
        self._packages: Packages | None = None

    def run(
        self,
        model: ComfyUIModel,
        message: RunJob,
        tensors: Tensors,
        on_step: StepBoundary,
        forward_under: Callable[[ParallelStrategy], ModuleForward],
    ) -> tuple[Tensors, RankRun]:
        """Runs the job with the other ranks; the latent is the first one's. Collective."""
        begun, placement = time.perf_counter(), message.placement
        world = self._layouts.world
        forward = forward_under(placement.strategy)
        sent = forward.bytes_sent
        switching: Switching[ModuleForward] | None = None
        if message.trials:
            trials = TrialRun(placement.strategy, message.trials, message.steps)
            switching = Switching(world, trials, forward_under, on_step)
        held = self._models.get(model) or self._models.setdefault(model, _JobModel(model))
        head, new = unpack_payload(tensors)
        job = self._read(held, head, new)
        answers = Answers(on_step, take_loop_state(dict(tensors)))
        cache = ModuleCache(job.cache_threshold) if job.cache_threshold > 0 else None
        meeting = ModuleMeeting(
            self._layouts,
            held.state,
            (lambda: forward) if switching is None else (lambda: switching.current),
            answers,
            head.mode,
            foreign_code(job.replaced),
            cache,
        )
        assert self._packages is not None, "the job was read with them"
        end_step = on_step if switching is None else switching.on_step
        run = _RunningJob(held, job, meeting, answers, end_step, self._packages)
        latent = run.to_its_end(message.steps, on_step, forward)
        record = run_record(forward if switching is None else switching.current, placement, begun, sent)
        record = replace(
            record,
            model_calls=meeting.calls,
            inside_seconds=on_step.inside_seconds,
            notes=(*record.notes, *meeting.notes, *run.notes),
            exact=record.exact and run.is_exact,
        )
        if cache is not None:
            exact = record.exact and not cache.reused
            record = replace(record, exact=exact, model_calls=cache.calls, reused_calls=cache.reused)
        if switching is not None:
            record = switching.told(record)
        seconds = torch.tensor(on_step.seconds, dtype=torch.float64)
        return {"latent": latent.float().cpu(), "step_seconds": seconds}, record

    def _read(self, held: _JobModel, head: Head, new: dict[int, Tensor]) -> SamplerRun:
        """Makes the job again on all ranks, or fails on all of them."""
        if head.is_fresh:
            self._tensors.clear()
        for number in head.dropped:
            self._tensors.pop(number, None)
        self._tensors |= new
        error: Exception | None = None
        try:
            if head.facts is not None:
                self._packages = self._packages_of(unpack_facts(head.facts))
            packages = self._packages
            if packages is None:
                raise RequestError("A job came before what the devices need to know of ComfyUI.")
            packages.import_packs(head.packs)
            here = RankObjects(
                device=held.patcher.load_device,
                resolve=held.find,
                find_module=packages.find_module,
                local_patcher=lambda: local_patcher(held.patcher, PATCHER_STATE),
                other_patcher=lambda: other_patcher(held.patcher.load_device),
                server=quiet_server,
                replaced=routed_functions(),
                tensors=self._tensors,
            )
            if head.prints is not None:
                others = differing(held.originals, head.prints)
                if others:
                    raise RequestError(OTHER_WEIGHTS + ",".join(others))
            job: SamplerRun = unpickle_job(head.job, here)
            changed = [one for one in job.changes if one.kind == "parameter"]
            if held.is_sharded and changed:
                raise RequestError(_SHARDED.format(name=f"{changed[0].path}.{changed[0].name}"))
        except Exception as failure:
            error = failure if isinstance(failure, ParallelError) else _as_refusal(failure)
        agree(self._layouts.world, error)
        return replace(job, replaced=[_rerouted(one) for one in job.replaced])

    def _packages_of(self, facts: ProcessFacts) -> Packages:
        ranks = range(self._layouts.world.world_size)
        return Packages(
            facts.comfyui,
            facts.own,
            facts.packs,
            facts.search_path,
            facts.folders,
            lambda: heartbeat.inside("the agreement on a job", ranks),
        )


class _RunningJob:
    """One job on one rank."""

    def __init__(
        self,
        held: _JobModel,
        job: SamplerRun,
        meeting: ModuleMeeting,
        answers: Answers,
        end_step: Callable[[int, Tensor], None],
        packages: Packages,
    ) -> None:
        self._held, self._job, self._meeting = held, job, meeting
        self._answers, self._end, self._packages = answers, end_step, packages
        self._step = self._steps = 0
        self.is_exact = True
        self.notes: tuple[str, ...] = ()

    def to_its_end(self, steps: int, on_step: StepBoundary, forward: ModuleForward) -> Tensor:
        """Returns the latent. What a pack raises is a RequestError, on all ranks."""
        self._steps = steps
        error: Exception | None = None
        latent = torch.empty(0)
        try:
            latent = self._sample(on_step, forward)
            on_step.finish()
        except Cancelled:
            raise
        except RanksApart as apart:
            error = apart
        except Exception as failure:
            if is_out_of_memory(failure) or is_device_failure(failure):
                raise
            error = failure if isinstance(failure, ParallelError) else _as_refusal(failure)
        self._meeting.leave(error)
        return latent

    def _sample(self, on_step: StepBoundary, forward: ModuleForward) -> Tensor:
        job, held = self._job, self._held
        guider = job.guider
        held.last_patcher = guider.model_patcher
        with contextlib.ExitStack() as undo:
            _set_random_states(job.random_states, held.patcher.load_device)
            undo.enter_context(restored(held.base))
            set_replaced(job.replaced, self._packages.find_module, undo)
            make_changes(held.base, job.changes, undo, lead_calls)
            undo.enter_context(self._meeting.holding(held.state.network))
            if not self._meeting.is_first:
                undo.enter_context(contextlib.redirect_stdout(io.StringIO()))
            noise, latent, sampler, sigmas, mask, seed = job.arguments
            if forward.stages is not None:
                sampler = self._flowing(forward, sampler, on_step)
            return run_guider(
                guider,
                job.wrappers,
                (noise, latent, sampler, sigmas, mask, seed),
                lambda step, denoised, x, steps: self._end_step(denoised),
                job.latent_shapes,
            )

    def _flowing(self, forward: ModuleForward, sampler: Any, on_step: StepBoundary) -> Any:
        """The sampler whose patches flow through PipeFusion's stages, or `sampler` where they cannot."""
        job, meeting = self._job, self._meeting
        noise, _, _, sigmas, _, seed = job.arguments
        flow = JobFlow(forward, meeting, job.guider, sampler, noise, sigmas, seed, self._end_step, on_step)
        reason = flow.why_not()
        if reason:
            self.notes = (WHOLE.format(reason=reason),)
            return sampler
        meeting.flow = flow

        def sample(*args: Any, **kwargs: Any) -> Tensor:
            latent = flow.sample(*args, **kwargs)
            self.is_exact = flow.is_exact
            if flow.why_whole:
                self.notes = (WHOLE.format(reason=flow.why_whole),)
            return latent

        return sampler_of(sample)

    def _end_step(self, denoised: Tensor) -> None:
        self._step = min(self._step + 1, self._steps)
        if self._step <= self._answers.steps_done:
            return
        self._meeting.agree_on_step(self._step)
        self._answers.step_ended(self._step)
        self._end(self._step - 1, denoised)


def _as_refusal(error: Exception) -> RequestError:
    """Makes `error` a refusal, with the line of the pack or of ComfyUI at which it was raised."""
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    where = "" if last is None else f" ({last.tb_frame.f_code.co_filename}:{last.tb_lineno})"
    refusal = RequestError(f"The devices could not run this job: {type(error).__name__}: {error}{where}")
    refusal.__cause__ = error
    return refusal


def _rerouted(one: Replaced) -> Replaced:
    """Has attention that a pack has put into a module lead through the router too."""
    if one.path or not is_attention(one.name) or not callable(one.value):
        return one
    return replace(one, value=reroute(one.name, one.value))


def _set_random_states(states: tuple[Any, ...], device: torch.device) -> None:
    of_torch, of_python, of_numpy, of_device = states
    torch.set_rng_state(of_torch)
    random.setstate(of_python)
    numpy.random.set_state(of_numpy)
    if of_device is not None and device.type == "cuda":
        torch.cuda.set_rng_state(of_device, device)
