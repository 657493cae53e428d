"""The parts of a case of benchmarks/faults.py: what it runs on, what it checks, how it is registered."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from subject import ranks_on, sample_request

from fault_injection import (
    fault,
)
from parallel_backend.errors import ParallelError
from parallel_backend.requests import ModelSpec, Placement
from parallel_backend.strategy import ParallelStrategy
from scripted import scripted_weights

ULYSSES = Placement(ParallelStrategy(ulysses_degree=2))
RING = Placement(ParallelStrategy(ring_degree=2))
PIPELINE = Placement(ParallelStrategy(pipefusion_degree=2, warmup_steps=2))
DEVICES = ("cpu:0", "cpu:1")
READY = 3.0  # s, limit of a restart without loading a model


@dataclass(frozen=True)
class Check:
    """A checked value. `limit`: None if it is only measured; `timed`: True if it is in seconds, on a quiet machine."""

    what: str
    value: float
    limit: float | None = None
    timed: bool = False

    def passes(self, slowness: float) -> bool:
        """Returns True if the value is within its limit. `slowness`: of the machine while the case ran (pace.py)."""
        if self.limit is None:
            return True
        return self.value <= self.limit * (slowness if self.timed else 1.0)


@dataclass(frozen=True)
class Subject:
    """The inputs of a case: a random Flux, a folder, the number of jobs of case 15 and of inputs of case 16."""

    flux: ModelSpec
    folder: Path
    jobs: int
    inputs: int

    def fired(self) -> Path:
        """Returns the path of a file that does not exist yet; a fault creates it when it fires."""
        return Path(tempfile.mkdtemp(dir=self.folder)) / "fired"

    @property
    def scripted(self) -> ModelSpec:
        return scripted_weights(self.folder / "good.safetensors", "good 0.5")


Case = Callable[[Subject], Iterator[Check]]
CASES: dict[str, tuple[str, Case]] = {}


def case(number: str, title: str) -> Callable[[Case], Case]:
    def register(run: Case) -> Case:
        CASES[number] = (title, run)
        return run

    return register


def true(what: str, fact: bool) -> Check:
    """Returns a check of a fact: its value is 0 if the fact holds."""
    return Check(what, 0.0 if fact else 1.0, 0.0)


def within(what: str, seconds: float, limit: float) -> Check:
    """Returns a check of a time in seconds."""
    return Check(what, seconds, limit, timed=True)


def seconds_since(fired: Path) -> float:
    return time.time() - fired.stat().st_mtime_ns / 1e9


def request(**changes):
    return replace(sample_request(128, steps=6), **changes)


def after_a_fault(
    subject: Subject,
    placement: Placement,
    kind: str,
    point: str,
    expected: type[ParallelError],
    *,
    words: str = "",
    allowed: float = 0.0,
) -> Iterator[Check]:
    """Runs a job with a fault. Checks the time to the error and to ready, and that two later jobs are bit-equal."""
    fired, caught = subject.fired(), None
    with ranks_on(*DEVICES) as sidecar:
        with fault(kind, point, step=2, once=fired):
            sidecar.start()
        try:
            sidecar.sample(subject.flux, request(), placement)
        except ParallelError as error:
            error_s, caught = seconds_since(fired), error
        begun = time.perf_counter()
        sidecar.start()
        ready_s = time.perf_counter() - begun
        load_s = sidecar.load(subject.flux, placement.strategy).seconds
        one = sidecar.sample(subject.flux, request(), placement).latent
        other = sidecar.sample(subject.flux, request(), placement).latent
    name = f"{kind} in {point}"
    yield true(f"{name}: {expected.__name__} {words}", type(caught) is expected and words in str(caught))
    yield within(
        f"{name}: s to the error" + (f" beyond {allowed:g} s" if allowed else ""), error_s - allowed, 0.5
    )
    yield within(f"{name}: s to ready", ready_s, READY)
    yield Check(f"{name}: s to load", load_s)
    yield true(f"{name}: the next jobs are bit-equal", torch.equal(one, other))


def error_of(call: Callable[[], object], kind: type[ParallelError] = ParallelError) -> str:
    """Returns the message of the error of type `kind` that `call` raises, or "" if it raises none."""
    try:
        call()
    except kind as error:
        return str(error)
    return ""
