"""A model's calls in ComfyUI's own loop: one plan for all like calls of a run, which may try strategies on its way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from torch import Tensor

from ...parallel_backend.errors import OutOfMemory, RankFailed
from ...parallel_backend.models.model_file import ModelFile
from ...parallel_backend.options import DEFAULT_COMPUTE, ComputeOptions
from ...parallel_backend.planner.history import record_run
from ...parallel_backend.planner.plan import job_from_latent
from ...parallel_backend.planner.rules import Plan, StrategySettings
from ...parallel_backend.planner.workload.checkpoint_model import CheckpointModel
from ...parallel_backend.planner.workload.workload import Job
from ...parallel_backend.requests import ModelSpec, Placement, RunInfo
from ...parallel_backend.sidecar.sidecar import Sidecar
from ...parallel_backend.trials import Trial, TrialRun
from ..host.calls import plan_by_rule, plan_job, ranks_for
from .options import COMPUTE_OPTIONS, SETTINGS

Answer = TypeVar("Answer")
_RUNS_KEPT = 4  # of one sampling: prompts of other lengths, or with and without references, come in turn


@dataclass
class _Run:
    """A sampling run, or those of its calls that are alike: what tells it from others, its plan, the strategies that it
    tries, and the seconds of its calls.

    `job`: as it was asked for; `plan.job`: with its options settled.
    """

    settings: StrategySettings
    job: Job
    sigmas: Tensor | None
    plan: Plan
    trials: TrialRun | None = None
    seconds: list[float] = field(default_factory=list)
    reused: int = 0  # of its calls, by a step cache

    @property
    def plan_now(self) -> Plan:
        """The plan with the strategy that the next call runs under."""
        if self.trials is None:
            return self.plan
        return self.plan.under(self.trials.strategy)

    def took(self, info: RunInfo) -> RunInfo:
        """A call has ended well. Nobody tells when a run is over: what was tried is kept when that is settled, and what
        the calls took with as many of them as the run has steps."""
        self.seconds += info.step_seconds
        self.reused += info.reused_calls
        trials = self.trials
        if trials is not None and not trials.is_settled:
            trials.took(info.step_seconds[-1])
            if trials.is_settled and trials.results:
                info = replace(info, trials=trials.results)
                record_run(self.plan.devices, self.plan.job, info)
        elif len(self.seconds) == self.plan.job.steps and not (trials and trials.results):
            whole = replace(info, step_seconds=tuple(self.seconds), reused_calls=self.reused)
            record_run(self.plan.devices, self.plan.job, whole)
        return info

    def failed(self) -> None:
        """Where that was in the middle of a trial, the next prompt goes without its strategy."""
        trials = self.trials
        if trials is None or trials.is_settled or not trials.current:
            return
        tried = RunInfo("native", self.plan.strategy, trials=(Trial(trials.strategy),))
        trials.settle()
        record_run(self.plan.devices, self.plan.job, tried)


class RunPlans:
    """Of one model. What is measured meanwhile must not change a plan half-way through a run. `latest`: of its calls,
    or of a job that ran on the ranks as a whole."""

    def __init__(self, spec: ModelSpec, file: ModelFile) -> None:
        self._spec = spec
        self._file = file
        self._runs: list[_Run] = []
        self.latest: Plan | None = None

    def run(
        self,
        options: dict,
        shape: Sequence[int],
        text: int,
        call: Callable[[Sidecar, Placement], tuple[Answer, RunInfo]],
        *,
        references: Sequence[Sequence[int]] = (),
        patch_bytes: int = 0,
        once: bool = False,
        step_cache: bool = False,
    ) -> tuple[Answer, Plan, RunInfo]:
        """Makes a call with these transformer_options, of a latent of this `shape` with its rows first, on the ranks.

        `text`: tokens of the prompt; `references`: shapes of the latents of reference images; `patch_bytes`: as of
        Job; `once`: it comes once in a run, for which the rule is good enough; `step_cache`: the run goes by one.
        """
        run = self._of_call(options, shape, text, references, patch_bytes, once, step_cache)
        plan = run.plan_now
        with ranks_for(plan) as ranks:
            try:
                answer, info = call(*ranks)
            except (RankFailed, OutOfMemory):  # a cancel or a refused prompt says nothing of a strategy
                run.failed()
                raise
        return answer, run.plan, info if once else run.took(info)

    def _of_call(
        self,
        options: dict,
        shape: Sequence[int],
        text: int,
        references: Sequence[Sequence[int]],
        patch_bytes: int,
        once: bool,
        step_cache: bool,
    ) -> _Run:
        """The run that the call belongs to; for one that comes `once` a run of its own."""
        rows, sigmas = options.get("cond_or_uncond", [0]), options.get("sample_sigmas")
        settings = options.get(SETTINGS, StrategySettings())
        if step_cache:  # which PipeFusion, the other approximation, does not go with
            settings = replace(settings, approximation="never")
        job = job_from_latent(
            CheckpointModel(self._file, self._spec.weight_dtype, compute_options(options)),
            (max(1, shape[0] // len(rows)), *shape[1:]),
            text=text,
            has_cfg=len(set(rows)) > 1,
            steps=max(1, len(sigmas) - 1) if sigmas is not None else 1,
            references=references,
        )
        job = replace(job, patch_bytes=patch_bytes, step_cache=step_cache)
        for run in self._runs:
            if (run.settings, run.job) == (settings, job) and run.sigmas is sigmas:
                return run
        if once:
            return _Run(settings, job, sigmas, plan_by_rule(settings, job))
        plan = plan_job(settings, job)
        trials = TrialRun(plan.strategy, plan.trials, job.steps) if plan.trials else None
        run = _Run(settings, job, sigmas, plan, trials)
        self._runs = [*(other for other in self._runs if other.sigmas is sigmas), run][-_RUNS_KEPT:]
        self.latest = plan
        return run


def compute_options(options: dict) -> ComputeOptions:
    """How the ranks compute a call with these transformer_options."""
    return options.get(COMPUTE_OPTIONS, DEFAULT_COMPUTE)
