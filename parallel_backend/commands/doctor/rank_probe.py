"""Probes that need ranks: the links between them, the kernel in use, and one picture on two ranks against one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from ...models.demo.text_encoder import DemoTextEncoder, tokenize
from ...requests import Conditioning, ModelSpec, Placement, SampleRequest
from ...sidecar.sidecar import Sidecar
from ...strategy import ParallelStrategy
from ...wire.calibration import Calibration
from .parity import Parity, largest_difference

DEMO_MODEL = Path(__file__).resolve().parents[3] / "demo_model" / "transformer.safetensors"
CAPTION = "a red circle left of a blue square"
STEPS, CFG, LATENT = 4, 3.0, (1, 16, 16, 16)  # 128 x 128 pixels, the size that the demo model was trained on
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
    found = []
    for dtype in dtypes:
        spec = ModelSpec(str(DEMO_MODEL), weight_dtype=dtype)
        expected = one.sample(spec, _request(), Placement()).latent
        for strategy in STRATEGIES:
            latent = two.sample(spec, _request(), Placement(strategy)).latent
            found.append(Parity(dtype, strategy.describe(), largest_difference(latent, expected)))
    return found


def _request() -> SampleRequest:
    noise = torch.randn(LATENT, generator=torch.Generator().manual_seed(1))
    return SampleRequest(
        noise=noise,
        sigmas=torch.linspace(1, 0, STEPS + 1),
        positive=_encoded(CAPTION),
        negative=_encoded(""),
        cfg=CFG,
    )


def _encoded(text: str) -> Conditioning:
    context, pooled = DemoTextEncoder()(torch.tensor([tokenize(text)]))
    return Conditioning(context=context, pooled=pooled)
