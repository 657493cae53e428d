"""What it costs to hand a ControlNet's residuals to two ranks: 15 of a Flux.1 at 1024 x 1024, 360 MiB of bf16.

    python benchmarks/handoff.py [--calls 7] [--blocks 15] [--json]

The ranks' model only multiplies, so a call's time beyond its compute is the hand-off. The kinds of calls take turns:
- same: the residuals of the call before, which nobody has written into;
- new: others in every call, as a ControlNet makes them in every step, made before the clock starts;
- none: a call without any.
`parent_cpu` is the processor time of ComfyUI's process, which other programs on the machine distort less.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from statistics import median

import torch
from subject import finish

from parallel_backend.requests import Conditioning, Extras, PredictRequest
from scripted import scripted_sidecar, scripted_weights, two_ranks

TOKENS, WIDTH = 4096, 3072


def residuals(blocks: int) -> dict[int, torch.Tensor]:
    return {block: torch.randn(1, TOKENS, WIDTH, dtype=torch.bfloat16) for block in range(blocks)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--calls", type=int, default=7)
    parser.add_argument("--blocks", type=int, default=15)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    x = torch.randn(1, 4, 128, 128)
    prompt = Conditioning(torch.ones(1, 3, 4), torch.zeros(1, 2))
    same = residuals(args.blocks)
    taken: dict[str, list[tuple[float, float]]] = {"none": [], "same": [], "new": []}
    sidecar = scripted_sidecar()
    with tempfile.TemporaryDirectory() as folder:
        weights = scripted_weights(Path(folder) / "scripted.safetensors", "good 0.5")
        try:
            for number in range(args.calls + 2):
                for kind, times in taken.items():
                    given = {} if kind == "none" else same if kind == "same" else residuals(args.blocks)
                    request = PredictRequest(x, torch.ones(1), prompt, Extras(residuals=given))
                    begun, cpu = time.perf_counter(), time.process_time()
                    _, info = sidecar.predict(weights, request, two_ranks())
                    cpu = time.process_time() - cpu
                    if number > 1:  # the first ones load, and make the memory
                        times.append((time.perf_counter() - begun - sum(info.step_seconds), cpu))
        finally:
            sidecar.stop()
    size = sum(residual.nbytes for residual in same.values())
    result: dict[str, object] = {"mib": round(size / 2**20)}
    for kind, times in taken.items():
        wall, cpu = (round(1e3 * median(part), 2) for part in zip(*times, strict=True))
        result[kind] = {"beyond_compute_ms": wall, "parent_cpu_ms": cpu}
        print(f"residuals {kind}: {wall} ms beyond compute, {cpu} ms of the parent's processor time")
    finish(result, args.json)


if __name__ == "__main__":
    main()
