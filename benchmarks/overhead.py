"""Costs of the sidecar beyond compute: hand-off of a request, and a cold start.

    python benchmarks/overhead.py [--runs 40] [--json]

handoff_ms: wall time of a warm 4-step sample() of 128 KiB latents minus the time the ranks spent in the steps;
start_to_ready_s: from nothing to two ranks that take requests, without loading weights.
"""

from __future__ import annotations

import argparse
import time
from statistics import median

from subject import finish, random_flux, sample_request

from parallel_backend.requests import Placement
from parallel_backend.sidecar.sidecar import Sidecar
from parallel_backend.strategy import ParallelStrategy

TOKENS = 512  # 32 x 64 latent pixels x 16 channels x 4 bytes = 128 KiB
TWO = Placement(ParallelStrategy(ulysses_degree=2))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=40)
    parser.add_argument("--starts", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()

    starts = []
    for _ in range(args.starts):
        sidecar = Sidecar(("cpu:0", "cpu:1"))
        begin = time.perf_counter()
        sidecar.start()
        starts.append(time.perf_counter() - begin)
        sidecar.stop()

    with random_flux(heads=2, double_blocks=1, single_blocks=1) as spec:
        sidecar = Sidecar(("cpu:0", "cpu:1"))
        try:
            request, handoff = sample_request(TOKENS, steps=4), []
            for _ in range(3):
                sidecar.sample(spec, request, TWO)
            for _ in range(args.runs):
                begin = time.perf_counter()
                info = sidecar.sample(spec, request, TWO).info
                handoff.append(time.perf_counter() - begin - sum(info.step_seconds))
        finally:
            sidecar.stop()

    result = {
        "handoff_ms": round(median(handoff) * 1e3, 2),
        "start_to_ready_s": round(median(starts), 2),
    }
    print(
        f"hand-off per request, 128 KiB latents, 4 steps, 2 ranks: {result['handoff_ms']} ms beyond the steps"
    )
    print(f"cold start to ready, 2 ranks: {result['start_to_ready_s']} s (median of {args.starts})")
    finish(result, args.json)


if __name__ == "__main__":
    main()
