"""Savings and drift of the step cache, per threshold, on the trained demo model.

python benchmarks/step_cache.py [--captions 8] [--json]

Each caption is a separate job, as a person runs it. Saved calls and drift do not depend on the machine; seconds do.
"""

from __future__ import annotations

import torch
from drift import DEMO, Scenes, demo_request
from subject import finish, loop_job_of, make_parser, ranks_on
from torch import Tensor

from comfy_weight_files import spec as spec_of
from parallel_backend.requests import Placement, RunInfo
from parallel_backend.sidecar.sidecar import Sidecar
from parallel_backend.strategy import ParallelStrategy
from shipped_jobs import ship

THRESHOLDS = (0.03, 0.06, 0.08, 0.12, 0.16, 0.2, 0.3)
SAMPLERS = ("euler", "dpmpp_2m", "heun")


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--captions", type=int, default=8)
    args = parser.parse_args()

    placement = Placement(ParallelStrategy(cfg_degree=2))
    with ranks_on("cpu:0", "cpu:1") as sidecar:
        result = {
            sampler: measure(sidecar, placement, sampler, THRESHOLDS, args.captions) for sampler in SAMPLERS
        }
    for sampler, rows in result.items():
        for threshold, row in rows.items():
            print(
                f"{sampler:9} threshold {threshold:>4}  reused {row['reused']:3}/{row['calls']}  "
                f"PSNR {row['psnr']:6.2f} dB  max |difference| {row['max_abs']:.2e}  "
                f"right {row['right']}/{args.captions}  {row['seconds']:.2f} s"
            )
    finish(result, args.json)


def measure(
    sidecar: Sidecar, placement: Placement, sampler: str, thresholds: tuple[float, ...], captions: int
) -> dict[str, dict[str, float]]:
    """Returns per threshold the model calls, the reused ones, the result of `Scenes.drift` and the steps' seconds."""
    scenes, spec = Scenes(captions), spec_of(DEMO.path)

    def sample(threshold: float) -> tuple[Tensor, list[RunInfo]]:
        latents, infos = [], []
        for caption in scenes.captions:
            job = loop_job_of(demo_request([caption]), sampler, threshold)
            result = sidecar.sample(spec, ship(spec, job), placement)
            latents.append(result.latent)
            infos.append(result.info)
        return torch.cat(latents), infos

    exact, infos = sample(0.0)
    rows = {"0": _row(scenes.drift(exact, exact), infos)}
    for threshold in thresholds:
        latent, infos = sample(threshold)
        rows[str(threshold)] = _row(scenes.drift(latent, exact), infos)
    return rows


def _row(drift: dict[str, float], infos: list[RunInfo]) -> dict[str, float]:
    return {
        "calls": sum(info.model_calls for info in infos),
        "reused": sum(info.reused_calls for info in infos),
        **drift,
        "seconds": sum(sum(info.step_seconds) for info in infos),
    }


if __name__ == "__main__":
    main()
