"""Probes that need ranks: the links between them, the kernel in use, and one picture on two ranks against one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from ...models.registry import inspect_model
from ...requests import Conditioning, InputShapes, ModelSpec, Placement, SampleRequest
from ...sidecar.sidecar import Sidecar
from ...strategy import ParallelStrategy
from ...wire.calibration import Calibration
from .parity import Parity, largest_difference

DEMO_MODEL = Path(__file__).resolve().parents[3] / "demo_model" / "transformer.safetensors"
CFG = 4.0  # with any scale other than 1 the negative prompt is evaluated
_GUIDANCE = 3.5
# Seconds at most for all ranks at once, and for each pair: NCCL makes a connection per pair.
LINKS_S, PAIR_S = 10.0, 1.0
# One strategy per way to split: tokens over all-to-all, tokens over a ring, the two prompts.
STRATEGIES = (
    ParallelStrategy(ulysses_degree=2),
    ParallelStrategy(ring_degree=2),
    ParallelStrategy(cfg_degree=2),
)


def probe_links(sidecar: Sidecar, on_phase: Callable[[str], None] | None = None) -> tuple[Calibration, ...]:
    """Runs a thorough calibration of all ranks of `sidecar` and returns one entry per rank."""
    count = len(sidecar.devices)
    everyone = Placement(ParallelStrategy(ring_degree=count))
    budget = LINKS_S + PAIR_S * count * (count - 1) / 2
    return sidecar.calibrate(everyone, budget_s=budget, thorough=True, on_phase=on_phase)


def probe_parity(two: Sidecar, one: Sidecar, dtypes: tuple[str, ...]) -> list[Parity]:
    """Compares the demo model's latent on two ranks with that on one, for each dtype and way to split."""
    inputs = inspect_model(str(DEMO_MODEL)).inputs
    request = random_request(inputs, width=128, height=128, batch=1, text=24, steps=4, with_cfg=True)
    found = []
    for dtype in dtypes:
        spec = ModelSpec(str(DEMO_MODEL), weight_dtype=dtype)
        expected = one.sample(spec, request, Placement()).latent
        for strategy in STRATEGIES:
            latent = two.sample(spec, request, Placement(strategy)).latent
            found.append(Parity(dtype, strategy.describe(), largest_difference(latent, expected)))
    return found


def random_request(
    inputs: InputShapes, *, width: int, height: int, batch: int, text: int, steps: int, with_cfg: bool
) -> SampleRequest:
    """Returns a text-to-image request with random inputs: time does not depend on the picture. Sizes in pixels."""
    generator = torch.Generator().manual_seed(0)

    def prompt() -> Conditioning:
        return Conditioning(
            context=torch.randn(1, text, inputs.context, generator=generator),
            pooled=torch.randn(1, inputs.pooled, generator=generator),
            guidance=torch.tensor([_GUIDANCE]),  # ignored by models without a guidance embedding
        )

    noise = torch.randn(batch, inputs.channels_out, -(-height // 8), -(-width // 8), generator=generator)
    return SampleRequest(
        noise=noise,
        sigmas=torch.linspace(1, 0, steps + 1),
        positive=prompt(),
        negative=prompt() if with_cfg else None,
        cfg=CFG if with_cfg else 1.0,
    )
