"""Measures what the step cache reuses and gets wrong in each family: tiny random models, and one trained model.

    python benchmarks/step_cache_families.py [--only "wan2.1 t2v,z-image"] [--json]

A run is 20 Euler steps of one prompt. `usual`: calls that skipped blocks at the threshold that users know for Flux.1;
`half`: the threshold at which half of the calls skip blocks; `missed`: the error of a reused call there, divided by the
change of the model's answer since the last computed call, as a median over reused calls (0: exact, 1: no better than
the old answer). None of them depends on the machine. Random weights make no pictures, so there is no PSNR here; the
trained demo model is measured in the same way for comparison.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from itertools import pairwise
from statistics import median
from typing import Any

from drift import DEMO, demo_request
from subject import finish, make_parser, torch
from torch import Tensor

from comfy_modules import CASES, import_comfyui_here
from parallel_backend.engine.blocks.step_cache import ModuleCache
from parallel_backend.engine.comm.groups import Layouts, World
from parallel_backend.engine.load import load_under
from parallel_backend.engine.module_forward import make_module_forward
from parallel_backend.engine.plain_calls import answers_to
from parallel_backend.models.comfyui.tiny.cases import TinyModel
from parallel_backend.models.comfyui.tiny.weights import fill
from parallel_backend.options import DEFAULT_THRESHOLD
from parallel_backend.requests import STAY, ModuleCall, Placement, Rows
from parallel_backend.strategy import ParallelStrategy
from ranks import run_ranks

STEPS = 20
MOST = 4.0  # the largest threshold that is tried
TRAINED = "demo (trained)"
FAMILIES = (
    "flux1 + reference",
    "flux2 + reference",
    "chroma",
    "qwen-image",
    "z-image",
    "sd3.5 medium",
    "wan2.1 t2v",
    "wan2.1 i2v",
    "wan2.1 vace",
    "hunyuanvideo + mask",
    "hunyuanvideo 1.5",
    "ltx-video",
    "ltx-2 (video + sound)",
    "cosmos predict2",
    "kandinsky5",
)
Parts = list[Tensor]  # a latent, or video and sound
# Takes a latent, its noise level as a share of the largest, and the cache; returns the model's answer.
Answer = Callable[[Parts, float, ModuleCache | None], Parts]


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--only", default=",".join((TRAINED, *FAMILIES)), help="names, with commas between")
    args = parser.parse_args()
    import_comfyui_here()
    result = {}
    for name in args.only.split(","):
        (found,) = run_ranks(_of_family, 1, name, timeout=600)
        result[name] = found
        missed = "-" if found["missed"] is None else f"{found['missed']:.2f}"
        print(
            f"{name:24} {found['usual']:2} of {STEPS} at {DEFAULT_THRESHOLD}; {found['reused']:2} at "
            f"{found['half']:.3f}, missed {missed}",
            flush=True,
        )
    finish(result, args.json)


@torch.inference_mode()
def _of_family(world: World, name: str) -> dict[str, float | None]:
    layouts = Layouts(world)
    noise, answer = _trained(layouts) if name == TRAINED else _random(layouts, name)
    usual, _ = _run(noise, answer, DEFAULT_THRESHOLD)
    low, high = 0.0, MOST
    for _ in range(12):
        half = (low + high) / 2
        reused, missed = _run(noise, answer, half)
        if reused == STEPS // 2:
            break
        low, high = (half, high) if reused < STEPS // 2 else (low, half)
    return {"usual": usual, "half": round(half, 3), "reused": reused, "missed": missed}


def _run(noise: Parts, answer: Answer, threshold: float) -> tuple[int, float | None]:
    cache, x, before, missed = ModuleCache(threshold), [part.clone() for part in noise], None, []
    for level, step in _levels():
        reused = cache.reused
        found, whole = answer(x, level, cache), answer(x, level, None)
        if cache.reused > reused:
            assert before is not None, "a first call has nothing to reuse"
            missed.append(_distance(found, whole) / _distance(before, whole))
        else:
            before = whole
        for part, one in zip(x, found, strict=True):
            part[:, : one.shape[1]] += step * one  # further channels belong to a reference picture
    return len(missed), median(missed) if missed else None


def _levels() -> Iterator[tuple[float, float]]:
    """Returns (noise level from 1 down, its difference to the next level) for each step."""
    return ((here, after - here) for here, after in pairwise(torch.linspace(1, 0, STEPS + 1).tolist()))


def _distance(one: Parts, other: Parts) -> float:
    return sum((a - b).float().square().sum().item() for a, b in zip(one, other, strict=True)) ** 0.5


def _random(layouts: Layouts, name: str) -> tuple[Parts, Answer]:
    build, inputs = CASES[name]
    forward = make_module_forward(TinyModel(fill(build())), layouts, Placement(ParallelStrategy()))
    (latents, times), kwargs = inputs(1, 16, 16)
    several = isinstance(latents, (list, tuple))
    noise = list(latents) if several else [latents]

    def answer(x: Parts, level: float, cache: ModuleCache | None) -> Parts:
        at = _scaled(times, level)
        args, named = copy.deepcopy(((x if several else x[0], at), kwargs | {"transformer_options": {}}))
        found = forward(ModuleCall(args, named, 1, STAY, prompts=(0,)), cache)
        return list(found) if several else [found]

    return noise, answer


def _scaled(times: Any, level: float) -> Any:
    """Returns timesteps for noise level `level` (a share). `times`: the timesteps of the largest level."""
    if isinstance(times, (list, tuple)):
        return type(times)(_scaled(one, level) for one in times)
    return torch.full_like(times, level * times.max().item())


def _trained(layouts: Layouts) -> tuple[Parts, Answer]:
    strategy = ParallelStrategy()
    forward = make_module_forward(load_under(DEMO, layouts, strategy), layouts, Placement(strategy))
    request = demo_request(["a red circle left of a blue square"])

    def answer(x: Parts, level: float, cache: ModuleCache | None) -> Parts:
        rows = [Rows(x[0], torch.tensor([level]), request.positive)]
        return answers_to(rows, forward.model.module, lambda call: forward(call, cache))

    return [request.noise], answer


if __name__ == "__main__":
    main()
