"""Checks of a single device: its identity, attention kernels, loading, steps, waits, and equal bits in two runs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ...devices import is_cpu
from ...machine.probe import read_visible
from ...observability.gauges import read_free_bytes
from ...options import ComputeOptions
from ...planner.plan import job_from_request
from ...planner.workload.checkpoint_model import CheckpointModel
from ...planner.workload.memory import predict_memory
from ...wire.checks.findings import NO_GPU, Finding
from ..doctor.examine import DEVICES, SOFTWARE, look_at_installation
from ..doctor.links import of_ranks
from ..doctor.rank_probe import probe_links
from .ranks import ALONE, Ranks, compared, gigabytes, same_bits, steps_in_words

_STEPS = 3
# Allowed beyond the predicted bytes, for the slack of the allocator.
_SLACK_SHARE, _SLACK_BYTES = 1.1, 256e6


def check_installation(ranks: Ranks) -> Iterator[Finding]:
    """Runs the doctor's checks that need no ranks; leaves out what is ok, except for software and devices."""
    for found in look_at_installation(ranks.subject.devices):
        if found.status != "ok" or found.group in (SOFTWARE, DEVICES):
            yield replace(found, name=f"{found.group}: {found.name}")


def check_identity(ranks: Ranks) -> Iterator[Finding]:
    """Checks that NVML, which reports memory and links, numbers the ranks' cards in the same way as CUDA."""
    subject = ranks.subject
    calibrations = probe_links(ranks.group(len(subject.devices)))
    facts = [c.facts for c in calibrations if c.facts is not None]
    seen = read_visible()
    found = of_ranks(seen, calibrations)
    if len({f.device_uuid for f in facts}) < len(facts):
        remedy = "name each GPU once in CUDA_VISIBLE_DEVICES, and report it"
        yield Finding("UUIDs", "broken", "two processes compute on one card", remedy)
    elif found is None:
        words = f"{seen.source} does not know the cards that the processes name"
        remedy = "pip install nvidia-ml-py; in a container, let it see the same GPUs as CUDA_VISIBLE_DEVICES"
        yield Finding("UUIDs", "slow", words, remedy)
    elif list(found.devices) != [seen.devices[int(name.removeprefix("cuda:"))] for name in subject.devices]:
        words = f"{seen.source} and CUDA number the cards in another order, so memory and links are taken for others'"
        remedy = "set CUDA_DEVICE_ORDER=PCI_BUS_ID in the environment that ComfyUI starts in, and report it"
        yield Finding("UUIDs", "broken", words, remedy)
    else:
        words = f"{seen.source} and CUDA name the same {len(facts)}, by the same numbers"
        yield Finding("UUIDs", "ok", words)


def check_checkpoint(ranks: Ranks) -> Iterator[Finding]:
    """Loads the model and reports the seconds, and the memory according to NVML, torch and the prediction."""
    sidecar = ranks.group(1, fresh=True)
    first = sidecar.load(ranks.spec)
    sidecar.drop(ranks.spec)
    before = read_free_bytes(ranks.subject.devices[0])  # after the first load has created the context
    info = sidecar.load(ranks.spec)
    rate = info.bytes / max(info.seconds, 1e-6) / 1e9
    words = (
        f"{gigabytes(info.bytes)} in {first.seconds:.2f} s, imports included; again in {info.seconds:.2f} s"
    )
    words += f" ({rate:.2f} GB/s), kept as {info.dtype}, computed in {info.compute_dtype}"
    yield Finding("loading", "ok", words)
    (rank,) = ranks.memory(1)
    on_cpu = is_cpu(ranks.subject.devices)
    job = job_from_request(CheckpointModel(ranks.file), ranks.request())
    (predicted,) = predict_memory(job, ALONE, on_cpu=on_cpu)
    weights = predicted.mapped if on_cpu else predicted.weights
    allocated = rank.weight_bytes + (0 if on_cpu else rank.working_bytes)
    finding = f"allocated {gigabytes(allocated)}, predicted {gigabytes(weights)}"
    yield judge_memory(finding, allocated, weights)
    after = read_free_bytes(ranks.subject.devices[0])
    if on_cpu:
        yield Finding("NVML", "skipped", f"{NO_GPU}: NVML knows nothing of the host's memory")
    elif not before or not after:
        yield Finding("NVML", "skipped", "NVML does not answer", "pip install nvidia-ml-py")
    else:
        yield Finding("NVML", "ok", f"{gigabytes(before - after)} more in use on the card after loading")


def judge_memory(finding: str, allocated: float, predicted: float) -> Finding:
    if allocated <= _SLACK_SHARE * predicted + _SLACK_BYTES:
        return Finding("memory", "ok", finding)
    return Finding(
        "memory",
        "slow",
        f"{finding}: more than was predicted, so jobs that are said to fit may not",
        "report it with the model's dtype and size",
    )


def check_steps(ranks: Ranks) -> Iterator[Finding]:
    """Times three steps uncompiled and compiled; a job before each one takes the costs that only the first job has."""
    plain = [ranks.sample(steps=_STEPS) for _ in range(2)][-1]
    compiling = ComputeOptions(compile="blocks")
    first = ranks.sample(steps=_STEPS, options=compiling)
    again = ranks.sample(steps=_STEPS, options=compiling)
    yield Finding("uncompiled", "ok", f"{steps_in_words(plain)}, attention {plain.info.kernel}")
    stats = first.info.compiled
    if stats is None or not stats.graphs:
        notes = "; ".join(first.info.notes) or "no graph was made"
        yield Finding("compiled", "slow", notes, "install a C compiler and triton, or leave compile off")
        return
    words = f"{steps_in_words(again)}, after {stats.graphs} graphs in {stats.seconds:.1f} s"
    yield compared("compiled", again, plain, words)
    repeated = again.info.compiled
    if repeated is not None and repeated.graphs:
        remedy = "report it: the same request must find its graphs"
        yield Finding("recompiled", "slow", f"{repeated.graphs} graphs for the same request again", remedy)


def check_same_bits(ranks: Ranks) -> Iterator[Finding]:
    yield same_bits("two runs", ranks.sample(), ranks.expected(), "one device, one request, twice")
