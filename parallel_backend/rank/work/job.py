"""Runs jobs in a rank: all ranks run ComfyUI's own guider, wrappers and sampler in step, over models they hold."""

from __future__ import annotations

import contextlib
import io
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from ...engine.blocks.step_cache import ModuleCache
from ...engine.comm.groups import Layouts, World
from ...engine.module_forward import ModuleForward
from ...errors import Cancelled, ParallelError, RequestError
from ...job.payload import NetworkCall, PickledJob, SamplerRun, pack_answer, pack_step
from ...job.unpickling import unpack_payload
from ...models.comfyui.jobs.packages import Packages
from ...models.comfyui.jobs.patchers import root_patcher
from ...models.comfyui.jobs.samplers import call_network, fits_in_one_call, run_guider, sampler_of
from ...models.comfyui.placing import moved
from ...requests import InputShapes, RunInfo
from ...sampling.host_copy import NumbersCheck, most_lag
from ...strategy import ParallelStrategy
from ...trials import TrialRun
from ...wire.payloads import Tensors, take_state
from ...wire.protocol import RunJob
from ..jobs.reader import JobReader, PatchedModel
from ..jobs.set_up import set_up
from ..outcome.agreement import RanksApart, agree, agree_on_call, leave
from ..outcome.errors import as_refusal, is_fault
from ..outcome.first_values import are_unlike, first_ranks_values
from ..pipefusion.job_flow import JobFlow
from ..pipefusion.patch_flow import NO_FLOW
from .answers import Answers
from .call_mode import NetworkState, foreign_code
from .held_models import HeldModel
from .meeting import ModuleMeeting, lead_calls
from .run_record import run_record
from .step_boundary import StepBoundary
from .switching import Switching

if TYPE_CHECKING:
    from ...models.comfyui.model import ComfyUIModel


_READ = (
    "A node computes with the model's own weights (such as a Control-LoRA), which shard_weights and tensor_degree "
    "share out; set shard_weights to off and tensor_degree to 1, or take a whole ControlNet instead."
)


_WATCHED = "a node follows the latents of each step"


class ModelOfJobs(PatchedModel):
    """A held model as jobs use it."""

    def __init__(self, model: ComfyUIModel) -> None:
        patcher = root_patcher(model)
        network = patcher.model.diffusion_model
        self.is_shared_out = model.byte_sharding is not None or bool(model.cuts)
        self.originals = model.originals
        self.buffers = {f"diffusion_model.{name}": one.clone() for name, one in network.named_buffers()}
        if self.is_shared_out:
            network.__dict__["state_dict"] = _refusing_state(network)
        self.state = NetworkState(network, model.regions)
        super().__init__(patcher)  # looks at the network as it is now

    def find(self, word: tuple[Any, ...]) -> Any:
        """Returns the module or weight that a pickle names. A weight is whole and without patches, as nodes that merge
        models have it; the file has it where the rank holds a part."""
        held = super().find(word)
        if word[0] != "param" or word[1] not in self.originals:
            return held
        original = self.originals[word[1]]
        if not self.is_shared_out and held.shape == original.shape:
            return held
        dtype = None if held is None else held.dtype  # another rank has this bias
        return moved(cast("nn.Parameter", original), torch.device("cpu"), dtype, None)


def _refusing_state(network: nn.Module) -> Callable[..., Any]:
    """Returns a `state_dict` for a network whose weights are shared out. It raises RequestError if called on the
    network itself, for values; code that needs names calls the whole model's."""

    def state_dict(*args: Any, **kwargs: Any) -> Any:
        if not args and kwargs.get("destination") is None:
            raise RequestError(_READ)
        return type(network).state_dict(network, *args, **kwargs)

    return state_dict


class Jobs:
    """Runs jobs over the models that the rank holds."""

    def __init__(self, layouts: Layouts, reader: JobReader) -> None:
        self._layouts, self._reader = layouts, reader
        self._are_unlike: bool | None = None  # True if the ranks' cards are unlike; found at the first job

    def run(
        self,
        held: HeldModel,
        message: RunJob,
        tensors: Tensors,
        on_step: StepBoundary,
        forward_under: Callable[[ParallelStrategy], ModuleForward],
    ) -> tuple[Tensors, RunInfo]:
        """Runs a job over a model of ComfyUI's with the other ranks; returns (answer, record). Rank 0's answer counts.
        Collective."""
        started, placement = time.perf_counter(), message.placement
        assert placement is not None, "a model of a file has one"
        world = self._layouts.world
        used: list[ModuleForward] = []

        def use(strategy: ParallelStrategy) -> ModuleForward:
            used.append(forward_under(strategy))
            return used[-1]

        trials = TrialRun(placement.strategy, message.trials, message.steps)
        switching = Switching(world, trials, use, on_step)
        forward = switching.current
        sent = forward.bytes_sent
        if not isinstance(held.of_jobs, ModelOfJobs):
            held.of_jobs = ModelOfJobs(cast("ComfyUIModel", held.model))
        model = held.of_jobs
        head, new = unpack_payload(tensors)
        error: Exception | None = None
        try:
            job = self._reader.read(head, new, model)
        except ParallelError as refusal:
            error = refusal
        agree(world, error)
        answers = Answers(on_step, take_state(dict(tensors)))
        cache = ModuleCache(job.cache_threshold) if job.cache_threshold > 0 else None
        meeting = ModuleMeeting(
            self._layouts,
            model.state,
            lambda: switching.current,
            switching.leave_out,
            partial(fits_in_one_call, model.base),
            answers,
            head.mode,
            InputShapes(*head.inputs),
            foreign_code(job.replaced),
            cache,
        )
        end_step, packages = switching.on_step, self._reader.packages
        run = _RunningJob(world, model, job, meeting, answers, on_step, end_step, packages, message.steps)
        if self._are_unlike is None:
            self._are_unlike = are_unlike(world)
        shared = (
            first_ranks_values(world, lambda: meeting.same_on_all)
            if self._are_unlike
            else contextlib.nullcontext()
        )
        with shared:
            answer = run.to_its_end(forward)
        seconds = [time.perf_counter() - started] if isinstance(job.work, NetworkCall) else on_step.seconds
        notes, calls, reused = (*meeting.notes, *run.notes), meeting.calls, 0
        if cache is not None:
            calls, reused = cache.calls, cache.reused
        is_exact = all(one.exact for one in used) and run.is_exact and not reused
        record = run_record(switching.current, placement, sent, on_step, notes, is_exact=is_exact)
        record = replace(
            record,
            strategy=trials.strategy,
            trials=trials.results,
            model_calls=calls,
            reused_calls=reused,
        )
        times = {"step_seconds": torch.tensor(seconds, dtype=torch.float64)}
        return {**times, **pack_answer(answer, run.denoised), **run.changes}, record


@dataclass(eq=False)
class _RunningJob:
    """One job on one rank. `denoised`: of all images, after the latest step; `changes`: for later jobs
    (StateChanges)."""

    _world: World
    _model: ModelOfJobs
    _job: PickledJob
    _meeting: ModuleMeeting
    _answers: Answers
    _on_step: StepBoundary
    _end: Callable[[int, Tensor, int], None]
    _packages: Packages
    _steps: int
    _step: int = 0
    denoised: Tensor | None = None
    changes: Tensors = field(default_factory=dict)
    is_exact: bool = True
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        self._check_numbers = NumbersCheck(most_lag(self._model.patcher.load_device))

    def to_its_end(self, forward: ModuleForward) -> Any:
        """Returns the latent or the network's answer. Raises RequestError for an error of a pack. Collective."""
        error: Exception | None = None
        answer: Any = torch.empty(0)
        try:
            answer = self._run(forward)
            self._on_step.finish()
            self._check_numbers.finish()
        except Cancelled:
            raise
        except RanksApart as apart:
            error = apart
        except Exception as failure:
            if is_fault(failure):
                raise
            error = as_refusal(failure)
        leave(self._world, error)
        return answer

    def _run(self, forward: ModuleForward) -> Any:
        job, model, work = self._job, self._model, self._job.work
        assert isinstance(work, (SamplerRun, NetworkCall)), "jobs/modules.py runs the others"
        patcher = work.patcher if isinstance(work, NetworkCall) else work.guider.model_patcher
        with set_up(job, model, self._packages.find_module, lead_calls) as collect:
            with contextlib.ExitStack() as undo:
                undo.enter_context(self._meeting.holding(model.state.network))
                # Else the next job's patcher would take injections and objects out of a network without them.
                undo.callback(patcher.unpatch_model, unpatch_weights=False)
                if self._world.rank > 0:
                    undo.enter_context(contextlib.redirect_stdout(io.StringIO()))
                if isinstance(work, NetworkCall):
                    answer = call_network(patcher, model.state.network, work.args, work.kwargs)
                else:
                    answer = self._sample(work, forward)
            self.changes, notes = collect()
            self.notes += notes
            return answer

    def _sample(self, work: SamplerRun, forward: ModuleForward) -> Tensor:
        self._meeting.guider = work.guider
        noise, latent, sampler, sigmas, mask, seed = work.arguments
        if forward.stages is not None:
            sampler = self._flowing(work, forward)
        return run_guider(
            work.guider,
            work.wrappers,
            (noise, latent, sampler, sigmas, mask, seed),
            self._call_back,
            work.latent_shapes,
        )

    def _flowing(self, work: SamplerRun, forward: ModuleForward) -> Any:
        """Returns a sampler whose patches flow through PipeFusion's stages, or the job's own if they cannot."""
        _, _, sampler, *_ = work.arguments
        done = self._answers.steps_done
        flow = JobFlow(forward, self._meeting, work, self._end_step, self._on_step, done)
        reason = _WATCHED if self._job.sends_steps else flow.why_not(self._job.replaced, self._job.changes)
        if reason:
            self.notes = (NO_FLOW.format(reason=reason),)
            return sampler
        self._meeting.flow = flow.patch_flow

        def sample(*args: Any, **kwargs: Any) -> Tensor:
            latent = flow.sample(*args, **kwargs)
            self.is_exact = flow.patch_flow.exact
            if reason := flow.patch_flow.flow_blocked_by:
                self.notes = (NO_FLOW.format(reason=reason),)
            return latent

        return sampler_of(sample)

    def _call_back(self, step: int, denoised: Tensor, x: Tensor, steps: int) -> None:
        if self._job.sends_steps:
            self._on_step.progress.beside = pack_step(step, denoised, x, steps)
        self._end_step(denoised)

    def _end_step(self, denoised: Tensor) -> None:
        self._step = min(self._step + 1, self._steps)
        self.denoised = denoised
        if self._step <= self._answers.steps_done:
            return
        flags = agree_on_call(self._world, False, -1 - self._step, 0, self._on_step.flags())
        self._check_numbers(denoised, f"in step {self._step} of {self._steps}")
        self._answers.step_ended(self._step)
        self._end(self._step - 1, denoised, flags)
