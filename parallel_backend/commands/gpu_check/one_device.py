"""Checks of a single device: its identity, loading, steps, equal bits in two runs, and weights in memory (fp8, offload,
sleep)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

from ...devices import is_cpu
from ...machine.probe import read_visible
from ...models.dtypes import FP8
from ...observability.gauges import read_free_bytes
from ...options import ComputeOptions
from ...planner.plan import job_from_request
from ...planner.workload.checkpoint_model import CheckpointModel
from ...planner.workload.memory import predict_memory
from ...strategy import ParallelStrategy
from ...wire.checks.findings import NO_GPU, Finding
from ..doctor.examine import DEVICES, SOFTWARE, look_at_installation
from ..doctor.links import of_ranks
from ..doctor.parity import largest_difference
from ..doctor.rank_probe import probe_links
from .ranks import ALONE, Ranks, compared, gigabytes, same_bits, steps_in_words

_STEPS = 3
# Allowed beyond the predicted bytes, for the slack of the allocator.
_SLACK_SHARE, _SLACK_BYTES = 1.1, 256e6
# Largest relative difference: weights rounded to 8 bits give a similar, not an equal picture. The demo model gives 0.1.
_FP8_LIMIT = 0.5


def check_installation(ranks: Ranks) -> Iterator[Finding]:
    """Runs the doctor's checks that need no ranks; leaves out what is ok, except for software and devices."""
    for found in look_at_installation(ranks.subject.devices)[0]:
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


def check_fp8(ranks: Ranks) -> Iterator[Finding]:
    if FP8 in ranks.file.dtype:
        yield Finding("fp8", "skipped", "the file is in fp8, as everything here was")
        return
    expected = ranks.expected()
    result = ranks.sample(dtype=FP8)
    found = largest_difference(result.latent, expected.latent)
    load = result.info.load
    held = "" if load is None or not load.device_bytes else f", {gigabytes(load.device_bytes)} on the device"
    words = f"{steps_in_words(result)}{held}, largest difference {found:.1e} of the largest value"
    if found <= _FP8_LIMIT:
        yield Finding("fp8", "ok", words)
    else:
        remedy = "use weight_dtype auto, and report it with this text"
        yield Finding("fp8", "broken", f"{words}: another picture", remedy)


def check_offload(ranks: Ranks) -> Iterator[Finding]:
    expected = ranks.expected()
    result = ranks.sample(ParallelStrategy(offload_weights=True))
    notes = "".join(f"; {note}" for note in result.info.notes)
    yield compared("offload", result, expected, f"{steps_in_words(result)}{notes}")


def check_sleep(ranks: Ranks) -> Iterator[Finding]:
    """Gives the weights' memory back in both ways; the picture after each must be the same."""
    expected = ranks.sample()
    sidecar = ranks.group(1)
    actions: dict[str, tuple[str, Callable[[], None]]] = {
        "give back": (
            "left to the file and host memory",
            partial(sidecar.give_back, ranks.spec, sidecar.devices[0]),
        ),
        "sleep": ("discarded", sidecar.sleep),
    }
    for name, (where, act) in actions.items():
        before, started = ranks.memory(1)[0].weight_bytes, time.perf_counter()
        act()
        seconds, freed = time.perf_counter() - started, before - ranks.memory(1)[0].weight_bytes
        words = f"weights {where} in {seconds:.2f} s, {gigabytes(freed)} freed"
        yield same_bits(name, ranks.sample(), expected, words)


def check_comfyui(ranks: Ranks) -> Iterator[Finding]:
    yield Finding(
        "text encoder and VAE",
        "skipped",
        "not run: it takes ComfyUI itself",
        "run a workflow of yours three times in ComfyUI, changing the prompt each time: the report of Parallel "
        "Sampler must say for the second and third that the model was loaded already",
    )
