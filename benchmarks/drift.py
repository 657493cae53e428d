"""Drift of PipeFusion's latents from the exact ones, per number of warm-up steps, on the trained demo model.

python benchmarks/drift.py [--captions 8] [--plot docs/images/pipefusion_drift.png] [--json]
"""

from __future__ import annotations

import random
from pathlib import Path

import torch
from safetensors.torch import load_file
from subject import ROOT, finish, make_parser, ranks_on
from torch import Tensor

from demo_training.drawing import SIZE
from demo_training.judge import judge
from demo_training.scenes import random_scene
from parallel_backend.models.demo.image_coder import CHANNELS, DOWNSCALE, SCALE, SHIFT, DemoImageCoder
from parallel_backend.models.demo.text_encoder import DemoTextEncoder, tokenize
from parallel_backend.requests import Conditioning, ModelSpec, Placement, SampleRequest
from parallel_backend.sidecar.sidecar import Sidecar
from parallel_backend.strategy import ParallelStrategy

STEPS, CFG = 20, 3.0
WARM_UPS = (0, 1, 2, 4, 8, 12, 16, 20)
PATCHES = (2, 4)
DEMO = ModelSpec(str(ROOT / "demo_model" / "transformer.safetensors"))


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--captions", type=int, default=8)
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()

    with ranks_on("cpu:0", "cpu:1") as sidecar:
        result = {
            str(patches): measure_drift(sidecar, patches, WARM_UPS, args.captions) for patches in PATCHES
        }
    for patches, rows in result.items():
        for warm_up, row in rows.items():
            print(
                f"{patches} patches  warm-up {warm_up:>2}  PSNR {row['psnr']:6.1f} dB  "
                f"max |difference| {row['max_abs']:.2e}  right {row['right']}/{args.captions}"
            )
    if args.plot:
        plot(result, args.plot)
    finish(result, args.json)


def measure_drift(sidecar: Sidecar, patches: int, warm_ups: tuple[int, ...], captions: int) -> dict:
    """Returns the result of `Scenes.drift` for each number of warm-up steps."""
    scenes = Scenes(captions)
    request = demo_request(scenes.captions)

    def sample(warm_up: int) -> Tensor:
        strategy = ParallelStrategy(pipefusion_degree=2, num_pipeline_patch=patches, warmup_steps=warm_up)
        return sidecar.sample(DEMO, request, Placement(strategy)).latent

    exact = sample(STEPS)
    rows = {}
    for warm_up in warm_ups:
        rows[str(warm_up)] = scenes.drift(exact if warm_up >= STEPS else sample(warm_up), exact)
    return rows


class Scenes:
    """Scenes that the demo model was not trained on; `drift` measures how far their latents are from the exact ones."""

    def __init__(self, count: int) -> None:
        rng = random.Random(7)
        self._scenes = [random_scene(rng, held_out=True) for _ in range(count)]
        self._coder = DemoImageCoder().eval()
        self._coder.load_state_dict(load_file(ROOT / "demo_model" / "image_coder.safetensors"))

    @property
    def captions(self) -> list[str]:
        return [scene.caption for scene in self._scenes]

    def drift(self, latent: Tensor, exact: Tensor) -> dict[str, float]:
        """Returns the PSNR of the decoded images in dB (from the mean square error over all of them), the largest and
        root mean square latent difference relative to max|latent|, and how many captions a judge finds right."""
        pictures, expected = (_pictures(self._coder, x) for x in (latent, exact))
        error = (pictures - expected).square().mean()
        difference = (latent - exact) / exact.abs().max()
        return {
            "psnr": round((-10 * error.clamp_min(1e-10).log10()).item(), 2),  # 100 dB means equal
            "max_abs": difference.abs().max().item(),
            "rms": difference.square().mean().sqrt().item(),
            "right": sum(judge(p, scene).right for p, scene in zip(pictures, self._scenes, strict=True)),
        }


def demo_request(captions: list[str]) -> SampleRequest:
    """Returns a request for one image per caption, with CFG against the empty prompt: the demo model's evaluation."""
    noise = torch.randn(
        len(captions),
        CHANNELS,
        SIZE // DOWNSCALE,
        SIZE // DOWNSCALE,
        generator=torch.Generator().manual_seed(7),
    )
    return SampleRequest(
        noise=noise,
        sigmas=torch.linspace(1, 0, STEPS + 1),
        positive=_encoded(captions),
        negative=_encoded([""] * len(captions)),
        cfg=CFG,
    )


def _encoded(captions: list[str]) -> Conditioning:
    context, pooled = DemoTextEncoder()(torch.tensor([tokenize(caption) for caption in captions]))
    return Conditioning(context, pooled)


@torch.inference_mode()
def _pictures(coder: DemoImageCoder, latent: Tensor) -> Tensor:
    return (coder.decode(latent / SCALE + SHIFT) / 2 + 0.5).clamp(0, 1)


def plot(result: dict, path: Path) -> None:
    """Plots PSNR and largest latent difference over the number of warm-up steps, a line for each number of patches."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    for patches, rows in result.items():
        flowing = {int(w): row for w, row in rows.items() if int(w) < STEPS}
        left.plot(
            [*flowing], [row["psnr"] for row in flowing.values()], marker="o", label=f"{patches} patches"
        )
        right.plot([*flowing], [row["max_abs"] for row in flowing.values()], marker="o")
    left.set(xlabel=f"exact warm-up steps of {STEPS}", ylabel="PSNR of the image, dB")
    right.set(
        xlabel=f"exact warm-up steps of {STEPS}", ylabel="largest latent difference / max", yscale="log"
    )
    left.legend()
    for axes in (left, right):
        axes.grid(alpha=0.3)
    figure.suptitle(f"PipeFusion's drift from the exact result: demo model, {STEPS} Euler steps, CFG {CFG:g}")
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
