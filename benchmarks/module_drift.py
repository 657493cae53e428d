"""PipeFusion of a random Wan and a random Flux on two stages: difference from the exact latent, and time of a step.

    python benchmarks/module_drift.py [--only drift times] [--models wan flux] [--rounds 3] [--json]

- drift: the latent after 20 Euler steps at CFG 2.5 of a tiny model with random weights, by the number of warm-up steps,
  against the latent after warm-up steps only;
- times: t(1) / (2 * t(2)) of a flowing step of a random model (width 512, 8 blocks; Flux has 4 of each kind) over 2,048
  tokens at CFG 1, four patches, medians of interleaved jobs. It needs a quiet machine.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from subject import finish, make_parser, ranks_on

from comfy_weight_files import spec as spec_of
from comfy_weight_files import write
from loop_jobs import loop_job
from parallel_backend.requests import ModelSpec, Placement
from parallel_backend.sidecar.sidecar import Sidecar
from parallel_backend.strategy import ParallelStrategy
from shipped_jobs import LoopJob, ship
from wan_jobs import tiny_wan, wan_job

STEPS = 20
WARM_UPS = (1, 2, 4, 8, 12, 16)
PATCHES = (2, 4)
TIMED_STEPS, TIMED_PATCHES = 8, 4
PIPE = ParallelStrategy(pipefusion_degree=2)


@dataclass(frozen=True)
class Subject:
    """A model to measure. `make(folder, timed)`: writes its file, a larger one if `timed`; `job(**options)`: returns a
    job; `size`: size of a timed job's latent, in frames (of a video), rows and columns."""

    make: Callable[[Path, bool], ModelSpec]
    job: Callable[..., LoopJob]
    size: tuple[int, ...]


def _wan(folder: Path, timed: bool) -> ModelSpec:
    return tiny_wan(folder, blocks=8, dim=512) if timed else tiny_wan(folder)


def _flux(folder: Path, timed: bool) -> ModelSpec:
    path = folder / f"flux {timed}.safetensors"
    return spec_of(write(path, "fp32", blocks=4, hidden=512) if timed else write(path, "fp32"))


SUBJECTS = {"wan": Subject(_wan, wan_job, (8, 32, 32)), "flux": Subject(_flux, loop_job, (64, 128))}


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--only", nargs="+", default=["drift", "times"], choices=["drift", "times"])
    parser.add_argument("--models", nargs="+", default=list(SUBJECTS), choices=list(SUBJECTS))
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    result: dict[str, object] = {}
    with tempfile.TemporaryDirectory() as name:
        for model in args.models:
            print(model)
            if "drift" in args.only:
                result[f"{model} drift"] = measure_drift(SUBJECTS[model], Path(name))
            if "times" in args.only:
                result[f"{model} times"] = measure_times(SUBJECTS[model], Path(name), args.rounds)
    finish(result, args.json)


def measure_drift(subject: Subject, folder: Path) -> dict[str, dict[str, float]]:
    """Returns per patches and warm-up steps the largest and root mean square difference, over the largest value."""
    spec, job, found = subject.make(folder, False), subject.job(steps=STEPS), dict[str, dict[str, float]]()
    with ranks_on("cpu:0", "cpu:1") as sidecar:
        exact = sidecar.sample(spec, ship(spec, job), Placement(PIPE.replace(warmup_steps=STEPS))).latent
        for patches in PATCHES:
            for warm_up in WARM_UPS:
                strategy = PIPE.replace(warmup_steps=warm_up, num_pipeline_patch=patches)
                latent = sidecar.sample(spec, ship(spec, job), Placement(strategy)).latent
                off = (latent - exact) / exact.abs().max()
                row = {"max": off.abs().max().item(), "rms": off.square().mean().sqrt().item()}
                found[f"{patches} patches, warm-up {warm_up}"] = row
                print(f"{patches} patches  warm-up {warm_up:>2}  max {row['max']:.2e}  rms {row['rms']:.2e}")
    return found


def measure_times(subject: Subject, folder: Path, rounds: int) -> dict[str, float]:
    """Returns seconds of a step on one device and of a flowing step on two, and the efficiency."""
    spec, job = subject.make(folder, True), subject.job(steps=TIMED_STEPS, size=subject.size, cfg=1.0)
    flowing = PIPE.replace(num_pipeline_patch=TIMED_PATCHES)
    times: dict[str, list[float]] = {"one": [], "two": []}
    with ranks_on("cpu:2") as one, ranks_on("cpu:0", "cpu:1") as two:
        for _ in range(rounds + 1):
            times["one"] += _steps(one, spec, job, ParallelStrategy())
            times["two"] += _steps(two, spec, job, flowing)
    # Leaves out the first job of each, which loads the model.
    alone, shared = (median(times[name][TIMED_STEPS - 2 :]) for name in ("one", "two"))
    efficiency = alone / (2 * shared)
    print(
        f"a step: {alone:.3f} s on one device, {shared:.3f} s flowing through two: efficiency {efficiency:.3f}"
    )
    return {"one_s": alone, "two_s": shared, "efficiency": efficiency}


def _steps(sidecar: Sidecar, spec: ModelSpec, job: LoopJob, strategy: ParallelStrategy) -> list[float]:
    """Returns seconds of each step except the first two: the warm-up step, and the step in which patches start."""
    return list(sidecar.sample(spec, ship(spec, job), Placement(strategy)).info.step_seconds[2:])


if __name__ == "__main__":
    main()
