"""Checks of where time goes: the kernels of a compiled step, and a step of ComfyUI's own sampler with a ControlNet."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

import torch
from torch import Tensor

from ...models.model_file import ModelFile
from ...requests import Conditioning, Extras, Placement, PredictRequest, RunInfo
from ...strategy import ParallelStrategy
from ...wire.gpu_check import Finding
from .checks import Check, Group
from .ranks import ALONE, Ranks, difference

_RESIDUALS = 15  # blocks that a ControlNet for Flux.1 adds to
_CALLS = 6  # of which the first warms up
_LIMIT = {True: 0.1, False: 1e-4}  # of the difference from one device: bfloat16 on a GPU, float32 on the CPU
_PIXELS_PER_LATENT, _PATCH = 8, 2
_CPU = torch.device("cpu")


def check_stepwise(ranks: Ranks) -> Sequence[Finding]:
    """Model calls as a sampler of ComfyUI makes them: what a call takes beyond the ranks' own time, and whether each of
    them gives the same. On a GPU its tensors lie there, and are sent anew with each call."""
    device = torch.device(ranks.subject.devices[0] if ranks.subject.on_gpus else "cpu")
    with torch.inference_mode():  # as in ComfyUI: nobody can tell that a tensor is the same as before
        request = controlled_call(ranks.file, ranks.subject.pixels, ranks.subject.text, device)
        (alone, *_), _, _ = _calls(ranks, request, ALONE)
        strategy = ranks.split()
        velocities, outside, inside = _calls(ranks, request, strategy)
        found = max(difference(velocity, alone) for velocity in velocities)
    limit = _LIMIT[ranks.subject.on_gpus]
    size = sum(tensor.nbytes for tensor in request.extras.residuals.values())
    words = (
        f"{strategy.describe()}, {len(request.extras.residuals)} residuals of {size / 1e6:.0f} MB together: "
        f"{outside * 1e3:.1f} ms a call, {(outside - inside) * 1e3:.1f} ms of it beside the ranks' own; largest "
        f"difference from one device {found:.1e} of the largest value"
    )
    if found <= limit:
        return [Finding("stepwise", "ok", words)]
    remedy = "use Parallel Sampler without the ControlNet, and report it with this text"
    return [
        Finding("stepwise", "broken", f"{words}, where {limit:g} is rounding: pictures would differ", remedy)
    ]


def controlled_call(file: ModelFile, pixels: int, text: int, device: torch.device = _CPU) -> PredictRequest:
    """One picture of noise on `device`, and residuals of random numbers that differ from block to block."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device)

    side = pixels // _PIXELS_PER_LATENT
    tokens = (side // _PATCH) ** 2
    blocks = min(_RESIDUALS, file.shape.blocks)
    prompt = Conditioning(
        context=draw(1, text, file.context_dim),
        pooled=draw(1, file.pooled_dim),
        guidance=torch.tensor([3.5], device=device) if file.has_guidance else None,
    )
    residuals = {n: (0.1 * draw(1, tokens, file.hidden_size)).bfloat16() for n in range(blocks)}
    return PredictRequest(
        x=draw(1, file.inputs.channels_in, side, side),
        sigma=torch.tensor([0.5], device=device),
        conditioning=prompt,
        extras=Extras(residuals=residuals),
    )


def _calls(
    ranks: Ranks, request: PredictRequest, strategy: ParallelStrategy
) -> tuple[list[Tensor], float, float]:
    """(the velocity of each call; of the median one its seconds here, and those of them on the ranks)."""
    sidecar = ranks.group(strategy.world_size)
    velocities, outside, inside = [], [], []
    for _ in range(_CALLS):
        began = time.perf_counter()
        velocity, info = sidecar.predict(ranks.spec, request, Placement(strategy))
        outside.append(time.perf_counter() - began)
        velocities.append(velocity)
        inside.append(_seconds(info))
    return velocities, statistics.median(outside[1:]), statistics.median(inside[1:])


def _seconds(info: RunInfo) -> float:
    return sum(info.step_seconds)


TIMING = Group(
    "Time",
    (
        Check("profile", ranks=2, limit_s=900.0),
        Check("stepwise", check_stepwise),
    ),
)
