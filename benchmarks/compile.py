"""Costs and savings of compiled blocks: the first step, and warm steps compared with uncompiled ones.

python benchmarks/compile.py [--devices cuda:0,cuda:1] [--tokens 512,2048] [--rounds 5] [--json]

Runs of both kinds take turns on the same ranks and weights, so that other load affects both. Inductor's cache starts
empty: the first step is that of a machine that has never compiled this model.
"""

from __future__ import annotations

import os
import tempfile
from statistics import median

from subject import SIZES, finish, make_parser, random_flux, ranks_on, sample_request

from parallel_backend.options import ComputeOptions
from parallel_backend.requests import ModelSpec, Placement
from parallel_backend.sidecar.sidecar import Sidecar
from parallel_backend.strategy import ParallelStrategy

STEPS = 5


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--devices", default="cpu:0")
    parser.add_argument("--tokens", default="512,2048", help=f"image tokens, of {', '.join(map(str, SIZES))}")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--heads", type=int, default=8, help="24 are Flux.1's")
    args = parser.parse_args()

    devices = tuple(args.devices.split(","))
    sizes = [int(tokens) for tokens in args.tokens.split(",")]
    with random_flux(args.heads) as spec, tempfile.TemporaryDirectory() as cache:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
        with ranks_on(*devices) as sidecar:
            result = {str(tokens): measure(sidecar, spec, tokens, args.rounds) for tokens in sizes}
    for tokens, row in result.items():
        print(
            f"{tokens:>5} image tokens: first step {row['first_step']:6.1f} s ({row['graphs']:.0f} graphs in "
            f"{row['compile']:.1f} s); warm {row['uncompiled']:.3f} s uncompiled, {row['compiled']:.3f} s compiled, "
            f"{row['uncompiled'] / row['compiled']:.2f} times as fast; off by {row['off']:.1e}"
        )
    finish(result, args.json)


def measure(sidecar: Sidecar, spec: ModelSpec, tokens: int, rounds: int) -> dict[str, float]:
    """Returns seconds of the compiled first step and of compiling, the number of graphs, medians of warm steps of both
    kinds, and the compiled latent's largest difference from the other one, relative to the largest value."""
    strategy = ParallelStrategy(ulysses_degree=len(sidecar.devices))
    request = sample_request(tokens, STEPS)
    plain, compiled = (
        Placement(strategy, compute_options=ComputeOptions(mode)) for mode in ("off", "blocks")
    )
    expected = sidecar.sample(spec, request, plain).latent
    first = sidecar.sample(spec, request, compiled)
    seconds: dict[Placement, list[float]] = {plain: [], compiled: []}
    for _ in range(rounds):
        for placement, taken in seconds.items():
            taken += sidecar.sample(spec, request, placement).info.step_seconds[1:]
    return {
        "first_step": first.info.step_seconds[0],
        "graphs": float(first.info.compiled.graphs),
        "compile": first.info.compiled.seconds,
        "uncompiled": median(seconds[plain]),
        "compiled": median(seconds[compiled]),
        "off": ((first.latent - expected).abs().max() / expected.abs().max()).item(),
    }


if __name__ == "__main__":
    main()
