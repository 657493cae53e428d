"""Subjects of the benchmarks: a random Flux file, ranks, and requests of a given size, plain or as ComfyUI ships them;
their parser of options, and a description of the machine."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support"), str(ROOT / "scripts")]
# One thread per rank unless asked otherwise, so that 1 rank and 2 ranks differ in ranks only.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch  # noqa: E402

from parallel_backend.requests import Conditioning, ModelSpec, SampleRequest  # noqa: E402
from parallel_backend.sidecar.sidecar import Sidecar  # noqa: E402
from tiny_flux import write_tiny_flux  # noqa: E402

if TYPE_CHECKING:  # it imports test support for ComfyUI, which few benchmarks need
    from shipped_jobs import LoopJob

CONTEXT_DIM, POOLED_DIM, TEXT_TOKENS = 64, 32, 64
# Latent height and width (in latent pixels, 2x2 per token) for each number of image tokens.
SIZES = {16: (8, 8), 128: (16, 32), 512: (32, 64), 1024: (64, 64), 2048: (64, 128), 4096: (128, 128)}


@contextmanager
def random_flux(heads: int = 4, double_blocks: int = 2, single_blocks: int = 4):
    """Yields the ModelSpec of a random Flux (hidden = 128 * heads) in a temporary file."""
    with tempfile.TemporaryDirectory() as folder:
        path = write_tiny_flux(
            Path(folder) / "random_flux.safetensors",
            heads=heads,
            double_blocks=double_blocks,
            single_blocks=single_blocks,
            context_dim=CONTEXT_DIM,
            pooled_dim=POOLED_DIM,
        )
        yield ModelSpec(str(path))


@contextmanager
def ranks_on(*devices: str, **options: Any) -> Iterator[Sidecar]:
    """Yields a sidecar of these devices, and ends its ranks. `options`: of Sidecar."""
    sidecar = Sidecar(devices, **options)
    try:
        yield sidecar
    finally:
        sidecar.stop()


def prompt(seed: int) -> Conditioning:
    generator = torch.Generator().manual_seed(seed)
    return Conditioning(
        context=torch.randn(1, TEXT_TOKENS, CONTEXT_DIM, generator=generator),
        pooled=torch.randn(1, POOLED_DIM, generator=generator),
        guidance=torch.tensor([3.5]),
    )


def sample_request(tokens: int, steps: int, cfg: float = 1.0) -> SampleRequest:
    """Returns a text-to-image request of `tokens` image tokens; cfg != 1 adds a negative prompt."""
    height, width = SIZES[tokens]
    noise = torch.randn(1, 16, height, width, generator=torch.Generator().manual_seed(0))
    return SampleRequest(
        noise=noise,
        sigmas=torch.linspace(1, 0, steps + 1),
        positive=prompt(1),
        negative=prompt(2) if cfg != 1.0 else None,
        cfg=cfg,
    )


def loop_job_of(request: SampleRequest, sampler: str = "euler", cache_threshold: float = 0.0) -> LoopJob:
    """Returns the job that ComfyUI ships, with its own guider and sampler, of a request's noise, prompts and sigmas."""
    from shipped_jobs import LoopJob

    def cond(prompt: Conditioning) -> dict[str, Any]:
        found = {"c_crossattn": ("CONDCrossAttn", prompt.context), "y": ("CONDRegular", prompt.pooled)}
        if prompt.guidance is not None:
            found["guidance"] = ("CONDRegular", prompt.guidance)
        return {"model_conds": found}

    sides = {"positive": request.positive, "negative": request.negative or request.positive}
    return LoopJob(
        noise=request.noise,
        latent=torch.zeros_like(request.noise),
        sigmas=request.sigmas,
        conds={side: [cond(prompt)] for side, prompt in sides.items()},
        cfg=request.cfg,
        sampler=sampler,
        seed=0,
        cache_threshold=cache_threshold,
    )


def machine() -> str:
    model = next(
        (
            line.split(":", 1)[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if "model name" in line
        ),
        platform.processor(),
    )
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return (
        f"{os.cpu_count()} cores ({model}), {', '.join(gpus) or 'no GPU'}, Python {platform.python_version()}, "
        f"torch {torch.__version__}, {os.environ.get('OMP_NUM_THREADS', 'all cores shared out as')} thread(s) per rank"
    )


def make_parser(text: str) -> argparse.ArgumentParser:
    """Returns a parser that shows a benchmark's docstring as its help. It has the option --json, for `finish`."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    return parser


def finish(result: dict, as_json: bool) -> None:
    """Prints the machine; `as_json` also prints the result as one JSON object on the last line."""
    print(f"machine: {machine()}")
    if as_json:
        print(json.dumps(result))
