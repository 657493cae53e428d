"""Measurements of one machine: step times of real runs, and what links carry."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from statistics import median

from ..machine.fingerprint import device_key
from ..strategy import ParallelStrategy
from .workload.workload import Job


@dataclass(frozen=True)
class RunKind:
    """A kind of runs whose step times can be compared: one model (CheckpointModel.key), one job size (as in Job), one
    strategy and engine. `devices`: device_key() of the devices in use."""

    model: str
    width: int
    height: int
    frames: int
    batch: int
    prompts: int
    text_tokens: int
    reference_tokens: int
    model_calls: int
    strategy: ParallelStrategy
    engine: str
    devices: str

    @classmethod
    def of(cls, job: Job, strategy: ParallelStrategy, engine: str, devices: Sequence[str]) -> RunKind:
        return cls(
            job.model.key,
            job.width,
            job.height,
            job.frames,
            job.batch,
            job.prompts,
            job.text_tokens,
            job.reference_tokens,
            job.model_calls,
            strategy,
            engine,
            device_key(devices[: strategy.world_size]),
        )

    @cached_property
    def workload(self) -> str:
        """The fields that say what was computed, without those that say how, as JSON."""
        how = {"strategy", "engine", "devices"}
        return json.dumps({f.name: getattr(self, f.name) for f in fields(self) if f.name not in how})


@dataclass(frozen=True)
class LinkRate:
    """The exchange rate of some devices when all exchange at once. `devices`: device_key() in rank order;
    `bytes_per_second`: sent by the slowest device; `latency_s`: of a collective of one number; `at`: Unix time of the
    measurement."""

    devices: str
    bytes_per_second: float
    latency_s: float
    at: float


def warm_step(step_seconds: Sequence[float]) -> float | None:
    """Returns the median step without the first, which warms up; None if there was no other."""
    return median(step_seconds[1:]) if len(step_seconds) > 1 else None
