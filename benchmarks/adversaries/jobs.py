"""Random jobs and model calls: any size, prompt and strategy that the checks let through gives one rank's result,
and ranks that are killed at any moment cost a retry or one error."""

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

TOLERANCE = 1e-5  # of the largest value
MOST_STEPS = 3
REAL_START = 10  # of so many killed groups one starts as ComfyUI's do, with an import of torch


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
    """Of `size` ranks, whatever the rules say of it. A pipeline's steps are all warm-up, so that it is exact too."""
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


def compare_strategies(spec: ModelSpec, count: int, findings: Findings) -> None:
    """`count` random jobs and calls on 2, 3 and 4 ranks against one."""
    with quick_starts():
        _compare_strategies(spec, count, findings)


def _compare_strategies(spec: ModelSpec, count: int, findings: Findings) -> None:
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
    """Of a random job by one rank and by several, of the largest value."""
    request = random_request(draw)
    expected = one.sample(spec, request, Placement()).latent
    found = several.sample(spec, request, placement).latent
    return ((found - expected).abs().max() / expected.abs().max()).item()


def kill_at_random(weights: ModelSpec, count: int, findings: Findings) -> None:
    """Ranks are killed somewhere between their start and the end of a job."""
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
    """(kind of finding, what was found)"""
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
