"""Parallel efficiency of 2 ranks x 1 thread against 1 rank x 1 thread: t(1) / (2 * t(2)), medians of interleaved runs.

`inside`: ms of a step that rank 0 of two spends in exchanges, moving bytes or waiting for the other rank.
PipeFusion's efficiency is of its steady state: the steps with flowing patches, except the one that fills the pipeline.
Its exact warm-up step, in which one rank works while the other waits, is listed separately.

python benchmarks/efficiency.py [--tokens 512 2048 4096] [--rounds 5] [--only ulysses_2 …] [--json]
"""

from __future__ import annotations

from statistics import median

from subject import SIZES, finish, make_parser, random_flux, ranks_on, sample_request

from parallel_backend.requests import Placement
from parallel_backend.strategy import ParallelStrategy

CASES = {
    "ulysses_2": (ParallelStrategy(ulysses_degree=2), 1.0),
    "ring_2": (ParallelStrategy(ring_degree=2), 1.0),
    "cfg_2": (ParallelStrategy(cfg_degree=2), 4.0),
    "pipefusion_2": (ParallelStrategy(pipefusion_degree=2, num_pipeline_patch=4), 1.0),
}
WARM_UP = "pipefusion_2_warmup"


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 2048, 4096], choices=list(SIZES))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--engine", default="auto")
    parser.add_argument("--only", nargs="+", choices=list(CASES), default=list(CASES))
    args = parser.parse_args()

    result: dict[str, dict[str, float]] = {}
    with random_flux() as spec, ranks_on("cpu:0") as one, ranks_on("cpu:0", "cpu:1") as two:
        for tokens in args.tokens:
            times, inside = _measure(one, two, spec, tokens, args)
            result[str(tokens)] = {
                name: round(median(single) / (2 * median(double)), 3)
                for name, (single, double) in times.items()
            }
            for name, (single, double) in times.items():
                print(
                    f"{tokens:5d} tokens  {name:19s}  1 rank {median(single) * 1e3:8.1f} ms/step  "
                    f"2 ranks {median(double) * 1e3:8.1f} ms/step  efficiency {result[str(tokens)][name]:.3f}"
                    + (f"  inside {median(inside[name]) * 1e3:.0f} ms" if inside.get(name) else "")
                )
    finish(result, args.json)


def _measure(one, two, spec, tokens, args):
    """Returns per case the step times on one rank and on two, measured in turns so that both see the same load, and
    rank 0's seconds in exchanges for each step of the run on two (none if steps are not timed separately)."""
    cases = {name: case for name, case in CASES.items() if name in args.only}
    times = {name: ([], []) for name in (*cases, *([WARM_UP] if "pipefusion_2" in cases else []))}
    inside = {name: [] for name in cases}
    for round_number in range(args.rounds + 1):
        for name, (strategy, cfg) in cases.items():
            request = sample_request(tokens, args.steps, cfg)
            single = one.sample(spec, request, Placement(engine=args.engine))
            double = two.sample(spec, request, Placement(strategy, args.engine))
            if round_number:  # the first round warms up
                times[name][0].extend(single.info.step_seconds)
                begin = 0
                if strategy.pipefusion_degree > 1:
                    begin = strategy.warmup_steps + 1
                    times[WARM_UP][0].extend(single.info.step_seconds)
                    times[WARM_UP][1].extend(double.info.step_seconds[: strategy.warmup_steps])
                times[name][1].extend(double.info.step_seconds[begin:])
                inside[name].extend(*double.info.inside_seconds[:1])
    return times, inside


if __name__ == "__main__":
    main()
