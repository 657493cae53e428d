"""Costs of two models that take turns on warm ranks, as Wan 2.2's two experts or a base and its refiner do.

    python benchmarks/model_switch.py [--runs 40] [--json]

switch_ms: time from the request until the other model is in use, as reported; job_ms: time beyond compute of a one-step
job that switches, minus that of a job of the same model right after it; load_ms: time beyond compute of a job if the
ranks hold one model at a time, so that each turn loads a file (which is in the page cache). Two random Flux models of 6
blocks of width 512, 128 tokens, 2 ranks, Ulysses 2.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from statistics import median

from subject import finish, make_parser, random_flux, ranks_on, sample_request

from parallel_backend.requests import ModelSpec, Placement, SampleRequest
from parallel_backend.sidecar.sidecar import Sidecar
from parallel_backend.strategy import ParallelStrategy

TOKENS = 128
TWO = Placement(ParallelStrategy(ulysses_degree=2))
GOAL_MS = 50


def beyond_compute(sidecar: Sidecar, spec: ModelSpec, request: SampleRequest) -> tuple[float, float]:
    """Returns (a one-step job's seconds beyond compute, with the switch or load before it; seconds of that alone)."""
    begin = time.perf_counter()
    info = sidecar.sample(spec, request, TWO).info
    return time.perf_counter() - begin - sum(info.step_seconds), info.load.seconds


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--runs", type=int, default=40)
    args = parser.parse_args()
    request, switches, jobs, loads = sample_request(TOKENS, steps=1), [], [], []
    with ExitStack() as files:
        models = [files.enter_context(random_flux()) for _ in range(2)]
        with ranks_on("cpu:0", "cpu:1") as sidecar:
            for turn in range(args.runs + 4):
                with_switch, switch = beyond_compute(sidecar, models[turn % 2], request)
                without, _ = beyond_compute(sidecar, models[turn % 2], request)
                switches.append(switch)
                jobs.append(with_switch - without)
            for turn in range(4):
                sidecar.drop(models[(turn + 1) % 2])
                sidecar.drop(models[turn % 2])
                loads.append(beyond_compute(sidecar, models[turn % 2], request)[0])
    result = {
        "switch_ms": round(median(switches[4:]) * 1e3, 3),
        "job_ms": round(median(jobs[4:]) * 1e3, 2),
        "load_ms": round(median(loads) * 1e3, 1),
    }
    print(f"a switch between two warm models: {result['switch_ms']} ms (goal: {GOAL_MS} ms)")
    print(f"a job that switches: {result['job_ms']} ms more than one that does not")
    print(f"where each turn loads its file instead: {result['load_ms']} ms")
    finish(result, args.json)


if __name__ == "__main__":
    main()
