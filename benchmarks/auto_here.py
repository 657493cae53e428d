"""Checks `auto` on this machine: which strategy a job with an empty history ends in, and what its trials cost.

python benchmarks/auto_here.py [--tokens 16 128 512] [--steps 28] [--rounds 3] [--minutes 8] [--json]
python benchmarks/auto_here.py --first-job [--tokens 512 1024 2048] [--minutes 20] …

A case is a size, with or without CFG, for one image or two. In each round, a full job under every strategy and a first
job with an empty history take turns on warm ranks; one device has all cores, as for users. The model is tiny. A case
that has used its share of --minutes makes no more rounds. With --first-job the last line is {"cases", "within_5pct",
"overhead_median"}: the share of first jobs that end in a strategy at most 5 % slower than the fastest full jobs, and
the median over the cases of a first job's time divided by the fastest strategy's time, minus one. Otherwise it is
{"cases", "within_10pct", "mean_regret", "worst_regret", "says_one_of_two"} for the strategy that the next job begins
with.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean, median

from subject import SIZES, finish, loop_job_of, make_parser, random_flux, sample_request
from torch import Tensor

from comfy_weight_files import spec as spec_of
from parallel_backend.models.registry import inspect_model
from parallel_backend.planner.candidates import rule_key
from parallel_backend.planner.history import GIVEN_UP, JOBS, open_history, record_run
from parallel_backend.planner.plan import find_machine, job_from_request, plan_execution
from parallel_backend.planner.rules import Plan, StrategySettings
from parallel_backend.planner.workload.checkpoint_model import CheckpointModel
from parallel_backend.planner.workload.workload import Job
from parallel_backend.requests import ModelSpec, Placement, SampleRequest
from parallel_backend.sidecar.resume import ShippedRequest
from parallel_backend.sidecar.sidecar import Sidecar
from parallel_backend.strategy import ParallelStrategy
from parallel_backend.trials import NO_TRIALS, TrialPlan
from parallel_backend.wire.cache_folder import VARIABLE
from shipped_jobs import ship

ONE = ParallelStrategy()
SETTINGS = StrategySettings(devices="cpu:2")
# Image tokens. A job of 16 tokens takes a quarter of a second, too short for the cost of trials to matter.
SMALL, FIRST_JOBS = (16, 128, 512), (512, 1024, 2048)


@dataclass
class Case:
    """A job size and its measurements. `seconds`: times of the full jobs, by strategy; `first_s`: times of first jobs;
    `ended`: strategies that the first jobs ended in; `next`: strategy that a job after the last of them begins with."""

    words: str
    seconds: dict[ParallelStrategy, list[float]]
    first_s: list[float]
    ended: list[ParallelStrategy]
    next: ParallelStrategy = ONE

    def regret(self, strategy: ParallelStrategy) -> float:
        return median(self.seconds[strategy]) / self.best_s - 1

    @property
    def best_s(self) -> float:
        return min(median(times) for times in self.seconds.values())

    @property
    def overhead(self) -> float:
        return median(self.first_s) / self.best_s - 1


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", choices=list(SIZES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--minutes", type=float, default=8.0, help="in all, on an idle machine")
    parser.add_argument("--steps", type=int, default=28)
    parser.add_argument("--first-job", action="store_true", help="judge first jobs, not those after them")
    args = parser.parse_args()
    os.environ.pop("OMP_NUM_THREADS", None)  # ranks divide the cores among them, as they do for users
    asked = list(requests(args.tokens or (FIRST_JOBS if args.first_job else SMALL), args.steps))
    end, cases = time.monotonic() + 60 * args.minutes, []
    with random_flux(heads=2, double_blocks=1, single_blocks=2) as spec, warm_ranks() as groups:
        for words, request in asked:  # small cases come first and leave their unused time to the others
            limit_s = (end - time.monotonic()) / (len(asked) - len(cases))
            cases.append(run_case(spec, groups, request, words, args.rounds, limit_s))
    finish(first_jobs(cases) if args.first_job else next_jobs(cases), args.json)


def requests(tokens: Sequence[int], steps: int) -> Iterator[tuple[str, SampleRequest]]:
    for count in tokens:
        for cfg in (1.0, 4.0):
            for batch in (1, 2):
                one = sample_request(count, steps, cfg)
                words = f"{count:5d} tokens, {'CFG' if cfg != 1 else 'no CFG'}, {batch} image(s)"
                yield words, replace(one, noise=one.noise.repeat(batch, 1, 1, 1))


@contextmanager
def warm_ranks() -> Iterator[dict[int, Sidecar]]:
    groups = {1: Sidecar(("cpu:0",)), 2: Sidecar(("cpu:0", "cpu:1"))}
    try:
        yield groups
    finally:
        for group in groups.values():
            group.stop()


def run_case(
    spec: ModelSpec,
    groups: dict[int, Sidecar],
    request: SampleRequest,
    words: str,
    rounds: int,
    limit_s: float,
) -> Case:
    begun = time.monotonic()
    job = job_from_request(CheckpointModel(inspect_model(spec.path)), request)
    spec = spec_of(spec.path)

    def shipped(trials: TrialPlan = NO_TRIALS, **changes: Tensor) -> ShippedRequest:
        return ship(spec, loop_job_of(replace(request, **changes)), trials=trials)

    with empty_history():
        first = plan(job)
    strategies = sorted({first.strategy, *first.trials.strategies}, key=rule_key)
    case = Case(words, {strategy: [] for strategy in strategies}, [], [])
    for strategy in strategies:  # warms up
        groups[strategy.world_size].sample(spec, shipped(sigmas=request.sigmas[-3:]), Placement(strategy))
    for number in range(rounds):
        if number and (time.monotonic() - begun) * (1 + 1 / number) > limit_s:
            break
        for strategy in strategies:
            info = groups[strategy.world_size].sample(spec, shipped(), Placement(strategy)).info
            case.seconds[strategy].append(sum(info.step_seconds))
        with empty_history():
            decided = plan(job)
            info = groups[2].sample(spec, shipped(decided.trials), Placement(decided.strategy)).info
            record_run(decided.devices, job, info)
            case.next = plan(job).strategy
        case.first_s.append(sum(info.step_seconds))
        case.ended.append(info.strategy)
    times = ", ".join(f"{s.describe()} {median(t):.3f} s" for s, t in case.seconds.items())
    ended = ", ".join(strategy.describe() for strategy in case.ended)
    print(f"{words}: ended in {ended}; {case.overhead:+.1%} over the best ({times})", flush=True)
    return case


@contextmanager
def empty_history() -> Iterator[None]:
    with tempfile.TemporaryDirectory() as folder:
        os.environ[VARIABLE] = str(Path(folder))
        GIVEN_UP.clear()
        JOBS.clear()
        yield


def plan(job: Job) -> Plan:
    machine = find_machine(SETTINGS.devices)
    return plan_execution(SETTINGS, job, machine, open_history(machine.devices), tries=True)


def first_jobs(cases: list[Case]) -> dict[str, float]:
    near = [mean(case.regret(strategy) <= 0.05 for strategy in case.ended) for case in cases]
    return {
        "cases": len(cases),
        "within_5pct": round(mean(near), 3),
        "overhead_median": round(median(case.overhead for case in cases), 4),
    }


def next_jobs(cases: list[Case]) -> dict[str, float]:
    regrets = [case.regret(case.next) for case in cases]
    return {
        "cases": len(cases),
        "within_10pct": round(mean(regret <= 0.10 for regret in regrets), 3),
        "mean_regret": round(mean(regrets), 4),
        "worst_regret": round(max(regrets), 4),
        "says_one_of_two": sum(case.next == ONE for case in cases),
    }


if __name__ == "__main__":
    main()
