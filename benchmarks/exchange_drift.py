"""Measures how far exchange_dtype fp8 moves a result from the exact one and what it sends: by class, on the demo model.

    python benchmarks/exchange_drift.py [--only classes,demo] [--captions 8] [--json]

- classes: calls of each tiny class of the table that splits tokens, under Ulysses 2 and Ring 2: the root mean square of
  the difference divided by that of the answer, and the bytes sent divided by those without rounding. The tiny classes
  have narrow heads and float32; a head of 128 channels in bfloat16 sends 132 bytes instead of 256;
- demo: latents of the trained demo model after 20 steps with Ulysses 2: PSNR, the largest difference, and how many
  pictures show what their caption names.
"""

from __future__ import annotations

import copy
from statistics import median

import torch
from drift import DEMO, Scenes, demo_request
from subject import finish, make_parser, ranks_on
from torch import Tensor

from comfy_modules import import_comfyui_here
from parallel_backend.engine.comm.groups import Layouts
from parallel_backend.engine.module_forward import make_module_forward
from parallel_backend.models.comfyui.tiny.cases import CASES, TinyModel
from parallel_backend.models.comfyui.tiny.weights import fill
from parallel_backend.models.tokens.table import TABLE, token_mode
from parallel_backend.options import DEFAULT_COMPUTE, ROUNDED, ComputeOptions
from parallel_backend.requests import BANDS, ModuleCall, Placement
from parallel_backend.strategy import ParallelStrategy
from ranks import run_ranks

KINDS = ("classes", "demo")
ROWS_OF_A_CALL, SIZE = 2, (16, 12)  # of the latent, in pixels
STRATEGIES = {"ulysses": ParallelStrategy(ulysses_degree=2), "ring": ParallelStrategy(ring_degree=2)}
IN_FP8 = ComputeOptions(exchange_dtype=ROUNDED)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--only", default=",".join(KINDS), help="some of the kinds, with commas between")
    parser.add_argument("--captions", type=int, default=8)
    args = parser.parse_args()
    wanted = args.only.split(",")
    if unknown := set(wanted) - set(KINDS):
        parser.error(f"no kind {min(unknown)}; there are {', '.join(KINDS)}")
    result: dict[str, object] = {}
    if "classes" in wanted:
        result["classes"] = _classes()
    if "demo" in wanted:
        result["demo"] = _demo(args.captions)
    finish(result, args.json)


def _classes() -> dict[str, dict[str, float]]:
    import_comfyui_here()
    found = {}
    for name in sorted(name for name, entry in TABLE.items() if name in CASES and not entry.bands):
        row = found[name] = run_ranks(drift_of_class, 2, name)[0]
        words = "  ".join(f"{key} {value:.3g}" for key, value in row.items())
        print(f"{name:28s} {words}", flush=True)
    for name in STRATEGIES:
        rows = [row[name] for row in found.values()]
        print(f"{name}: median {median(rows):.3g}, largest {max(rows):.3g} of the answer's root mean square")
    return found


@torch.inference_mode()
def drift_of_class(world, name: str) -> dict[str, float]:
    """Returns per strategy the largest drift of a class's calls, and the bytes of all calls over those unrounded."""
    layouts, found = Layouts(world), {}
    for way, strategy in STRATEGIES.items():
        worst, sent = 0.0, [0, 0]
        for build, inputs in CASES[name].values():
            model, (args, kwargs) = TinyModel(fill(build())), inputs(ROWS_OF_A_CALL, *SIZE)
            mode = token_mode(name, kwargs)
            if mode == BANDS:
                continue
            answers = []
            for place, computing in enumerate((DEFAULT_COMPUTE, IN_FP8)):
                forward = make_module_forward(model, layouts, Placement(strategy, compute_options=computing))
                before = forward.bytes_sent
                call = ModuleCall(*copy.deepcopy((args, kwargs)), ROWS_OF_A_CALL, mode)
                answers.append(_flat(forward(call)))
                sent[place] += forward.bytes_sent - before
            exact, rounded = answers
            worst = max(worst, ((rounded - exact).square().mean() / exact.square().mean()).sqrt().item())
        found |= {way: worst, f"{way} bytes": sent[1] / sent[0] if sent[0] else 1.0}
    return found


def _flat(answer) -> Tensor:
    """Returns all numbers of an answer, which is one tensor or several, as a flat tensor."""
    if isinstance(answer, Tensor):
        return answer.float().flatten()
    return torch.cat([_flat(part) for part in answer if isinstance(part, (Tensor, list, tuple))])


def _demo(captions: int) -> dict[str, float]:
    scenes = Scenes(captions)
    request = demo_request(scenes.captions)
    with ranks_on("cpu:0", "cpu:1") as sidecar:
        exact, rounded = (
            sidecar.sample(DEMO, request, Placement(STRATEGIES["ulysses"], compute_options=computing)).latent
            for computing in (DEFAULT_COMPUTE, IN_FP8)
        )
    row = scenes.drift(rounded, exact)
    print(
        f"demo model: PSNR {row['psnr']:.1f} dB, max |difference| {row['max_abs']:.2e}, right "
        f"{row['right']}/{captions} ({scenes.drift(exact, exact)['right']} without rounding)"
    )
    return row


if __name__ == "__main__":
    main()
