"""Random jobs: every size, prompt and strategy that passes the checks must give the result of one rank. A rank killed
at a random moment may only cost a retry or one error."""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Iterator
from dataclasses import replace

import torch
from subject import prompt, sample_request
from torch import Tensor

from parallel_backend.errors import ParallelError, RankFailed
from parallel_backend.models.registry import inspect_model
from parallel_backend.requests import (
    Conditioning,
    ModelSpec,
    Placement,
    SampleRequest,
)
from parallel_backend.sidecar.sidecar import Sidecar
from parallel_backend.strategy import ParallelStrategy
from scripted import SLOW, scripted_request, scripted_sidecar, two_ranks

from .findings import Before, Findings, quick_starts

TOLERANCE = 1e-5  # relative to the largest value
MOST_STEPS = 3
REAL_START = 10  # one in this many killed groups starts as ComfyUI's groups do, with an import of torch


def random_request(draw: random.Random) -> SampleRequest:
    noise = _random_latent(draw)
    cfg = draw.choice((1.0, 1.0, 4.0))
    return replace(
        sample_request(16, steps=draw.randint(1, MOST_STEPS)),
        noise=noise,
        positive=_random_prompt(draw),
        negative=None if cfg == 1.0 else _random_prompt(draw),
        cfg=cfg,
    )


def _random_latent(draw: random.Random) -> Tensor:
    batch, height, width = draw.choice((1, 1, 2, 3)), draw.randint(1, 9), draw.randint(1, 9)
    shape = (batch, 16, 2 * height - draw.randint(0, 1), 2 * width - draw.randint(0, 1))
    return torch.randn(shape, generator=torch.Generator().manual_seed(draw.randrange(2**32)))


def _random_prompt(draw: random.Random) -> Conditioning:
    whole = prompt(draw.randrange(100))
    return replace(whole, context=whole.context[:, : draw.choice((1, 2, 5, 33, 64))])


def random_strategy(draw: random.Random, size: int) -> ParallelStrategy:
    """Returns a strategy for `size` ranks that may break the rules. Pipelines only warm up, so they are exact."""
    degrees = dict.fromkeys(("data", "cfg", "pipefusion", "ring", "ulysses", "tensor"), 1)
    rest = size
    while rest > 1:
        factor = next(n for n in range(2, rest + 1) if rest % n == 0)
        degrees[draw.choice(list(degrees))] *= factor
        rest //= factor
    shares = tuple(draw.choice((1.0, 2.0, 1e-3, 1e6)) for _ in range(size)) if draw.random() < 0.3 else ()
    return ParallelStrategy(
        **{f"{name}_degree": degree for name, degree in degrees.items()},
        shard_weights=draw.random() < 0.3,
        num_pipeline_patch=draw.choice((0, 0, 1, 3, 33)),
        warmup_steps=MOST_STEPS,
        device_shares=shares,
    )


@quick_starts()
def compare_strategies(spec: ModelSpec, count: int, findings: Findings) -> None:
    """Compares `count` random jobs, a third each on 2, 3 and 4 ranks, with the same jobs on one rank."""
    draw, shape = random.Random(1), inspect_model(spec.path).shape
    before = Before()
    for size in (2, 3, 4):
        groups = {n: Sidecar(tuple(f"cpu:{i}" for i in range(n))) for n in (1, size)}
        try:
            for number in range(count // 3):
                strategy = random_strategy(draw, size)
                while strategy.violations(shape, size):
                    strategy = random_strategy(draw, size)
                findings.prompts += 1
                words = f"{strategy.describe()}, try {number} of {size} ranks"
                try:
                    off = _difference(draw, spec, groups[1], groups[size], Placement(strategy, "native"))
                except RankFailed as error:
                    kind = "hangs" if error.reason == "hang" else "bare_errors"
                    findings.add(kind, f"{words}: {error}")
                    continue
                if not off <= TOLERANCE:
                    findings.add("wrong", f"{words}: {off:.1e}")
        finally:
            for group in groups.values():
                group.stop()
        before.compare(findings, f"jobs on {size} ranks")


def _difference(
    draw: random.Random, spec: ModelSpec, one: Sidecar, several: Sidecar, placement: Placement
) -> float:
    """Returns the largest difference of a random job's latents on one rank and on several, over the largest value."""
    request = random_request(draw)
    expected = one.sample(spec, request, Placement()).latent
    found = several.sample(spec, request, placement).latent
    return ((found - expected).abs().max() / expected.abs().max()).item()


def kill_at_random(weights: ModelSpec, count: int, findings: Findings) -> None:
    """Runs `count` jobs, each on ranks of which one is killed at a random moment after their start."""
    draw, request = random.Random(2), scripted_request(SLOW, steps=6)
    with quick_starts() as forked:
        calm = scripted_sidecar()
        expected = calm.sample(weights, request, two_ranks()).latent
        calm.stop()
        before = Before()
        for number in range(count):
            findings.prompts += 1
            forked.enabled = number % REAL_START != 0
            how = draw.choice((signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM))
            for kind, words in _kill_one(weights, request, expected, how, draw):
                findings.add(kind, f"kill {number}, {how.name}: {words}")
        before.compare(findings, "killed ranks")


def _kill_one(
    weights: ModelSpec, request: SampleRequest, expected: Tensor, how: signal.Signals, draw: random.Random
) -> Iterator[tuple[str, str]]:
    """Runs a job, kills a rank during it and yields each finding as (kind, what was found)."""
    sidecar = scripted_sidecar(resumes=True)
    sidecar.start()
    killer = threading.Timer(draw.uniform(0.0, 0.6), os.kill, (draw.choice(sidecar.pids), how))
    killer.start()
    try:
        if not torch.equal(sidecar.sample(weights, request, two_ranks()).latent, expected):
            yield "wrong", "other bits"
    except RankFailed as error:
        if error.reason == "hang":
            yield "hangs", str(error)
    except ParallelError as error:
        yield "bare_errors", f"{type(error).__name__}: {error}"
    finally:
        killer.cancel()
        killer.join()
        sidecar.stop()
