"""Checks `auto` on this machine: its choice against every strategy measured in turns.

python benchmarks/auto_here.py [--tokens 16 128 512 2048] [--rounds 5] [--steps 4] [--json]

For one rank and for two, with and without CFG, at each size: `auto` decides as it does in ComfyUI (on a CPU it tries
each strategy for a few steps), then all strategies run in turns on warm ranks, as users run them: one rank has all
cores. `within_10pct`: share of the cases in which the chosen one takes at most 10 % longer than the fastest.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from dataclasses import replace
from statistics import mean, median

import torch
from subject import SIZES, finish, random_flux, sample_request

from parallel_backend.models.registry import inspect_model
from parallel_backend.planner.decide import find_machine, job_from_request, plan_by_trial_runs
from parallel_backend.planner.history.measurement_history import open_history
from parallel_backend.planner.history.store import VARIABLE
from parallel_backend.planner.job_models import CheckpointModel
from parallel_backend.planner.rules import StrategySettings
from parallel_backend.requests import Placement, RunInfo, SampleRequest
from parallel_backend.sidecar.sidecar import Sidecar
from parallel_backend.strategy import ParallelStrategy

ONE = ParallelStrategy()
WITHOUT_CFG = (ONE, ParallelStrategy(ulysses_degree=2), ParallelStrategy(ring_degree=2))
WITH_CFG = (*WITHOUT_CFG, ParallelStrategy(cfg_degree=2))
NEAR = 0.10  # longer than the best


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, nargs="+", default=list(SIZES)[:4], choices=list(SIZES))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    del os.environ["OMP_NUM_THREADS"]  # ranks share out the cores, as they do for users
    cases = []
    with random_flux() as spec, tempfile.TemporaryDirectory() as folder:
        os.environ[VARIABLE] = folder
        for tokens in args.tokens:
            for cfg in (1.0, 4.0):
                request = sample_request(tokens, args.steps, cfg)
                chosen = {ranks: _chosen(spec, request, ranks) for ranks in (1, 2)}
                seconds = _measured(spec, request, args.rounds)
                for ranks, strategy in chosen.items():
                    best = min(s for tried, s in seconds.items() if tried.world_size <= ranks)
                    cases.append((seconds[strategy] / best - 1, strategy == ONE and ranks == 2))
                    times = ", ".join(f"{s.describe()} {t * 1e3:.1f} ms" for s, t in seconds.items())
                    print(
                        f"{tokens:5d} tokens, {'CFG' if cfg != 1 else 'no CFG':6s}, {ranks} rank(s): "
                        f"{strategy.describe()}, {cases[-1][0]:.1%} over the best ({times})",
                        flush=True,
                    )
    regrets = [regret for regret, _ in cases]
    result = {
        "cases": len(cases),
        "within_10pct": round(mean(regret <= NEAR for regret in regrets), 3),
        "mean_regret": round(mean(regrets), 4),
        "worst_regret": round(max(regrets), 4),
        "says_one_of_two": sum(says_one for _, says_one in cases),
    }
    finish(result, args.json)


def _chosen(spec, request: SampleRequest, ranks: int) -> ParallelStrategy:
    job = job_from_request(CheckpointModel(inspect_model(spec.path)), request)
    trial = replace(request, sigmas=torch.linspace(*request.sigmas[:2].tolist(), 4))

    def try_out(strategy: ParallelStrategy, devices: tuple[str, ...]) -> RunInfo:
        sidecar = Sidecar(devices)
        try:
            return sidecar.sample(spec, trial, Placement(strategy)).info
        finally:
            sidecar.stop()

    settings = StrategySettings(devices=f"cpu:{ranks}")
    machine = find_machine(settings)
    history = open_history(machine.devices)
    return plan_by_trial_runs(settings, job, machine, history, try_out).decision.strategy


def _measured(spec, request: SampleRequest, rounds: int) -> dict[ParallelStrategy, float]:
    """Median seconds of a warm step of each strategy, in turns."""
    groups = {1: Sidecar(("cpu:0",)), 2: Sidecar(("cpu:0", "cpu:1"))}
    strategies = WITH_CFG if request.cfg != 1 else WITHOUT_CFG
    steps: dict[ParallelStrategy, list[float]] = {s: [] for s in strategies}
    try:
        for turn in range(rounds + 1):
            for strategy in strategies:
                info = groups[strategy.world_size].sample(spec, request, Placement(strategy)).info
                if turn:  # the first one warms up
                    steps[strategy] += info.step_seconds[1:]
    finally:
        for group in groups.values():
            group.stop()
    return {s: median(times) for s, times in steps.items()}


if __name__ == "__main__":
    main()
