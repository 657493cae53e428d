"""Drives ranks whose model is a script (scripted_rank.py), and finds out which processes run."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest
import torch

from parallel_backend.errors import Cancelled
from parallel_backend.requests import Conditioning, ModelSpec, Placement, SampleRequest
from parallel_backend.sidecar import pool
from parallel_backend.sidecar.sidecar import Sidecar
from parallel_backend.strategy import ParallelStrategy

# The first number of the prompt's pooled vector: it tells the forward of the ranks what to do.
QUIET, CRASH, RAISE, RAISE_ALL, NO_MEMORY, FLOOD, SLOW = range(7)


def scripted_sidecar(devices=("cpu:0", "cpu:1"), resumes=False) -> Sidecar:
    """Returns a sidecar of scripted ranks. `resumes`: False to raise the first crash."""
    sidecar = Sidecar(devices, rank_module="tests.support.rank_programs.scripted_rank")
    if not resumes:
        sidecar._ranks.retry_after_crash = lambda attempt, *rest: attempt()
    return sidecar


def scripted_weights(path: Path, script: str) -> ModelSpec:
    path.write_text(script)
    return ModelSpec(path=str(path))


def scripted_prompt(behaviour: int = 0) -> Conditioning:
    """Returns a prompt that tells the ranks how to behave (one of the constants above); mean(context) is 1."""
    return Conditioning(context=torch.ones(1, 3, 4), pooled=torch.full((1, 2), float(behaviour)))


def scripted_request(behaviour: int = 0, steps: int = 4) -> SampleRequest:
    return SampleRequest(
        noise=torch.randn(1, 4, 6, 6, generator=torch.Generator().manual_seed(0)),
        sigmas=torch.linspace(1, 0, steps + 1),
        positive=scripted_prompt(behaviour),
        negative=None,
        cfg=1.0,
    )


def is_held(spec: ModelSpec) -> bool:
    """Returns True if any ranks of this process hold `spec`."""
    return any(spec in sidecar.models for sidecar in pool.all_sidecars())


def two_ranks() -> Placement:
    return Placement(ParallelStrategy(ulysses_degree=2))


def cancel_after_a_step(sidecar: Sidecar, weights: ModelSpec) -> None:
    """Samples, and cancels once a step is reported. Fails if the request does not end by that."""
    steps: list[int] = []
    with pytest.raises(Cancelled):
        sidecar.sample(
            weights,
            scripted_request(),
            two_ranks(),
            on_step=lambda step, *_: steps.append(step),
            should_cancel=lambda: steps != [],
        )


def is_running(pid: int) -> bool:
    """Returns True if the process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False


def processes_with(*words: str) -> list[psutil.Process]:
    """Returns the running processes whose command lines have all these words."""
    running = psutil.process_iter(["cmdline"])
    return [process for process in running if set(words) <= set(process.info["cmdline"] or ())]


def ranks_of(parent: int) -> list[int]:
    """Returns the process ids of running ranks that were started for this parent, even if they now have another."""
    return [process.pid for process in processes_with("--parent", str(parent))]


def call_model(ranks, spec, x=None, behaviour=0, **options):
    """Runs a job of one step; returns (the model's velocity for x at sigma 1, how the job ran)."""
    x = torch.randn(2, 4, 6, 6) if x is None else x
    request = SampleRequest(
        noise=x,
        sigmas=torch.tensor([1.0, 0.0]),
        positive=scripted_prompt(behaviour),
        negative=None,
        cfg=1.0,
    )
    result = ranks.sample(spec, request, two_ranks(), **options)
    return x - result.latent, result.info
