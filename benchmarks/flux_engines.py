"""The two engines of a Flux.1 file: diffusers' (Parallel Flux Loader) and ComfyUI's own (Parallel Model Loader).

    python benchmarks/flux_engines.py [--tokens 2048] [--rounds 7] [--json]

For each: seconds from no ranks to the first answer of two (imports and the load included), ms of a model call on one
device and under Ulysses 2, medians of calls in turns, and MB of private memory of two ranks that hold the file. Then
what a strategy for the other engine would cost in the middle of a graph: the load of the same file by the other
engine, beside the first; and the largest difference of their answers, of the largest value.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from statistics import median

from subject import finish, predict_request, random_flux, torch

from comfy_modules import import_comfyui_here
from parallel_backend.requests import ModelSpec, ModuleCall, Placement, PredictRequest
from parallel_backend.sidecar.sidecar import Sidecar
from parallel_backend.strategy import ParallelStrategy

PLACEMENTS = {1: Placement(), 2: Placement(ParallelStrategy(ulysses_degree=2))}
ENGINES = ("diffusers", "comfyui")


class Subject:
    """One Flux.1 file as both engines take it."""

    def __init__(self, spec: ModelSpec, request: PredictRequest) -> None:
        self._request = request
        self._specs = {
            "diffusers": spec,
            "comfyui": ModelSpec(spec.path, family="comfyui", comfyui=import_comfyui_here()),
        }
        prompt = request.conditioning
        named = {"context": prompt.context, "y": prompt.pooled, "guidance": prompt.guidance}
        self._call = ModuleCall(
            (request.x, request.sigma), named | {"transformer_options": {}}, len(request.x), "stay"
        )

    def answer(self, sidecar: Sidecar, engine: str) -> tuple[torch.Tensor, float]:
        """(the velocity, seconds of the call on the ranks)"""
        spec, placement = self._specs[engine], PLACEMENTS[len(sidecar.devices)]
        if engine == "diffusers":
            found, info = sidecar.predict(spec, self._request, placement)
        else:
            found, info = sidecar.call(spec, self._call, placement)
        return found, sum(info.step_seconds)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    with random_flux(heads=4, double_blocks=2, single_blocks=4) as spec:
        subject = Subject(spec, predict_request(args.tokens))
        result = measured(subject, args.rounds)
    for name, found in result.items():
        print(f"{name}: {found}", flush=True)
    finish(result, args.json)


def measured(subject: Subject, rounds: int) -> dict[str, object]:
    first_s, private_mb, beside_s = {}, {}, {}
    for engine in ENGINES:
        sidecar, begun = Sidecar(("cpu:0", "cpu:1")), time.perf_counter()
        try:
            subject.answer(sidecar, engine)
            first_s[engine] = round(time.perf_counter() - begun, 2)
            private_mb[engine] = round(sum(map(_private, sidecar.pids)) / 1e6)
            other = next(name for name in ENGINES if name != engine)
            begun = time.perf_counter()
            subject.answer(sidecar, other)
            beside_s[f"{other} beside {engine}"] = round(time.perf_counter() - begun, 2)
        finally:
            sidecar.stop()
    call_ms, answers = {}, {}
    for ranks in PLACEMENTS:
        sidecar = Sidecar(tuple(f"cpu:{i}" for i in range(ranks)))
        times: dict[str, list[float]] = {engine: [] for engine in ENGINES}
        try:
            for number in range(rounds + 1):
                for engine in ENGINES:
                    answers[engine], seconds = subject.answer(sidecar, engine)
                    if number:  # the first round loads
                        times[engine].append(1e3 * seconds)
        finally:
            sidecar.stop()
        call_ms[str(ranks)] = {engine: round(median(found), 1) for engine, found in times.items()}
    one, other = (answers[engine] for engine in ENGINES)
    return {
        "first_answer_s": first_s,
        "private_mb": private_mb,
        "other_engine_s": beside_s,
        "call_ms": call_ms,
        "difference": float(f"{((one - other).abs().max() / one.abs().max()).item():.1e}"),
    }


def _private(pid: int) -> int:
    """Bytes that only this process has."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(1024 * int(line.split()[1]) for line in lines if line.startswith("Private_"))


if __name__ == "__main__":
    main()
