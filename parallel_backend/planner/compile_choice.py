"""Decides if `compile: auto` compiles a job's blocks: on recent GPUs, as soon as it would have paid for itself.

Compiled blocks serve later prompts as well, but the number of those is unknown. So a process adds up the time that
compiled blocks would have saved in this job and in earlier uncompiled ones, and compiles once that reaches the time to
compile. At worst this costs twice as much as knowing the future (the ski rental problem).
"""

from __future__ import annotations

import threading
from dataclasses import replace

from ..devices import is_cpu
from ..errors import RequestError
from ..machine.topology import Topology
from ..options import AUTO
from ..strategy import ParallelStrategy
from .history import MeasurementHistory
from .step_bounds import fastest_card, lower_bound
from .workload.workload import Job

# Seconds for the two kinds of a Flux model's blocks with an empty cache. A cautious assumption, not measured on a GPU.
COMPILE_SECONDS = 60.0
# Share of a step that compiled blocks save by launching fewer kernels and reading activations less often. An
# assumption until the job was measured both ways. The step time is the card's bound until one was measured.
SAVED_SHARE = 0.2
LEAST = (8, 0)  # compute capability; Triton's kernels gain little on older cards


class CompileChoice:
    """Resolves `auto` for the jobs of one process, and records the time that not compiling has cost."""

    def __init__(self) -> None:
        self._missed: dict[str, float] = {}  # seconds, by model key
        self._lock = threading.Lock()

    def settle(
        self, job: Job, devices: tuple[str, ...], topology: Topology, seen: MeasurementHistory | None = None
    ) -> tuple[Job, str]:
        """Returns (the job with blocks compiled or not, the reason). `topology`, `seen`: the topology and history of
        `devices`. The reason is empty if there was nothing to decide."""
        model = job.model
        if model.compute_options.compile != AUTO:
            return job, ""
        off = replace(job, model=model.uncompiled)
        if is_cpu(devices):
            return off, ""  # compiling gains little on a CPU, which needs no explanation
        if not model.shape.splits_tokens or model.shape.band_rows:
            return off, ""  # its blocks are unknown
        reason = _why_never(devices, topology)
        if reason is not None:
            return off, f"compile: auto left the blocks as they are: {reason}"
        on = replace(job, model=model.with_compile("blocks"))
        try:
            saved, how = _saved(off, on, topology, seen)
        except RequestError as error:
            return off, f"compile: auto left the blocks as they are: {error}"
        if saved <= 0:
            return off, "compile: auto left the blocks as they are: compiled ones were no faster here"
        with self._lock:
            missed = self._missed.get(model.key, 0.0)
            pays = missed + saved >= COMPILE_SECONDS
            self._missed[model.key] = max(missed + saved, missed)
        note = f"compiling takes about {COMPILE_SECONDS:.0f} s once and {how} about {saved:.1f} s of this job"
        if missed:
            note += f", {missed:.1f} s of those before"
        if pays:
            return on, f"compile: auto compiles: {note}"
        return off, f"compile: auto left the blocks as they are: {note}"


def _why_never(devices: tuple[str, ...], topology: Topology) -> str | None:
    if topology.source != "nvml" or len(topology.devices) < len(devices):
        return "what these GPUs can do is unknown (no NVML, as on ROCm)"
    oldest = min(device.capability for device in topology.devices)
    if oldest < LEAST:
        return f"a GPU has compute capability {oldest[0]}.{oldest[1]}, and it takes {LEAST[0]}.{LEAST[1]}"
    return None


def _saved(off: Job, on: Job, topology: Topology, seen: MeasurementHistory | None) -> tuple[float, str]:
    """Returns (seconds that compiled blocks save over all steps, the verb for a report, by how sure that is). Raises
    RequestError for an unknown card."""
    before, after = ({}, {}) if seen is None else (seen.steps_of(off), seen.steps_of(on))
    if both := before.keys() & after.keys():
        best = min(both, key=lambda s: min(before[s], after[s]))
        return off.steps * (before[best] - after[best]), "saves"
    if before:
        return SAVED_SHARE * off.steps * min(before.values()), "should save"
    fastest = fastest_card(topology)
    assert fastest is not None, "these are GPUs"
    least = lower_bound(off, ParallelStrategy(), fastest) / len(topology.devices)  # a split without loss
    return SAVED_SHARE * off.steps * least, "should save"
