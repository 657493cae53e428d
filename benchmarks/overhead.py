"""Costs of the sidecar beyond compute: hand-off of a request, a stepwise model call, and a cold start.

    python benchmarks/overhead.py [--runs 40] [--json]

handoff_ms: wall time of a warm 4-step sample() of 128 KiB latents minus the time the ranks spent in the steps;
stepwise_call_ms: the same for one predict() of the same size, conditioning unchanged between the calls;
stepwise_1024_ms: the same for a latent of 1024 x 1024 pixels (1 MiB);
control_shared_ms, control_apart_ms: what a ControlNet's residuals add to it, in a model of 12 blocks of width 1024,
where all blocks of a kind share one (2 of 2 MiB) and where each has its own (12), the kinds of calls taking turns;
control_anew_ms: the same for 12 that are new in each call, as a ControlNet gives them; latents always are;
start_to_ready_s: from nothing to two ranks that take requests, without loading weights.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from statistics import median

from subject import finish, predict_request, random_flux, sample_request, torch

from parallel_backend.requests import Extras, ModelSpec, Placement, PredictRequest
from parallel_backend.sidecar.sidecar import Sidecar
from parallel_backend.strategy import ParallelStrategy

TOKENS = 512  # 32 x 64 latent pixels x 16 channels x 4 bytes = 128 KiB
SQUARE_TOKENS = 4096  # 1024 x 1024 pixels: 1 MiB
TWO = Placement(ParallelStrategy(ulysses_degree=2))


BLOCKS = {"double_blocks": 4, "single_blocks": 8}


def with_residuals(call: PredictRequest, shared: bool) -> PredictRequest:
    """`call` with what a ControlNet adds after every block: one tensor for each kind of block, or one for each."""
    kinds = (range(4), range(4, 12))
    residuals = {}
    for blocks in kinds:
        one = torch.randn(1, TOKENS, 1024)
        residuals |= {block: one if shared else torch.randn(1, TOKENS, 1024) for block in blocks}
    return replace(call, extras=Extras(residuals=residuals))


def control_ms(sidecar: Sidecar, runs: int) -> dict[str, float]:
    """By kind of call, beyond compute and beyond the plain call."""
    with random_flux(heads=8, **BLOCKS) as spec:
        plain = predict_request(TOKENS)
        calls = {
            "plain": plain,
            "shared": with_residuals(plain, True),
            "apart": with_residuals(plain, False),
            "anew": with_residuals(plain, False),
        }
        times: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(runs + 2):
            for name, call in calls.items():
                for residual in call.extras.residuals.values() if name == "anew" else ():
                    residual.add_(0)
                times[name].append(beyond_compute(sidecar, spec, call))
    medians = {name: median(taken[2:]) * 1e3 for name, taken in times.items()}
    return {name: round(medians[name] - medians["plain"], 2) for name in ("shared", "apart", "anew")}


def beyond_compute(sidecar: Sidecar, spec: ModelSpec, call: PredictRequest) -> float:
    """Seconds of a call whose latent was not sent before."""
    call.x.add_(0)
    begin = time.perf_counter()
    _, info = sidecar.predict(spec, call, TWO)
    return time.perf_counter() - begin - sum(info.step_seconds)


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
            request, call = sample_request(TOKENS, steps=4), predict_request(TOKENS)
            for _ in range(3):
                sidecar.sample(spec, request, TWO)
                sidecar.predict(spec, call, TWO)
            handoff, stepwise = [], []
            for _ in range(args.runs):
                begin = time.perf_counter()
                info = sidecar.sample(spec, request, TWO).info
                handoff.append(time.perf_counter() - begin - sum(info.step_seconds))
                stepwise.append(beyond_compute(sidecar, spec, call))
            large, square = [], predict_request(SQUARE_TOKENS)
            for _ in range(args.runs + 2):
                large.append(beyond_compute(sidecar, spec, square))
            control = control_ms(sidecar, args.runs)
        finally:
            sidecar.stop()

    result = {
        "handoff_ms": round(median(handoff) * 1e3, 2),
        "stepwise_call_ms": round(median(stepwise) * 1e3, 2),
        "stepwise_1024_ms": round(median(large[2:]) * 1e3, 2),
        "control_shared_ms": control["shared"],
        "control_apart_ms": control["apart"],
        "control_anew_ms": control["anew"],
        "start_to_ready_s": round(median(starts), 2),
    }
    print(
        f"hand-off per request, 128 KiB latents, 4 steps, 2 ranks: {result['handoff_ms']} ms beyond the steps"
    )
    print(f"stepwise model call, same size: {result['stepwise_call_ms']} ms beyond compute")
    print(f"the same at 1024 x 1024: {result['stepwise_1024_ms']} ms beyond compute")
    print(
        f"a ControlNet's residuals beyond that: {control['shared']} ms for 2 that 12 blocks share, "
        f"{control['apart']} ms for 12 (2 MiB each), {control['anew']} ms for 12 that are new"
    )
    print(f"cold start to ready, 2 ranks: {result['start_to_ready_s']} s (median of {args.starts})")
    finish(result, args.json)


if __name__ == "__main__":
    main()
