"""The checks of the GPU check that look at the ranks themselves: device, attention kernels, one model call; and a fault
on purpose."""

from __future__ import annotations

import os
from typing import Any

import torch

from ...engine.comm.groups import Layouts
from ...errors import RequestError
from ...wire.checks.findings import NO_GPU, Finding
from ...wire.heartbeat import heartbeat
from ...wire.protocol import RunCheck

# torch's default allocator. With the other one, cudaMallocAsync, NCCL holds on to memory until none is left.
NATIVE = "native"
_SETTINGS = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
_PIECE = 2**28  # bytes of one allocation on a device


def run_check(message: RunCheck, layouts: Layouts) -> list[Finding]:
    """Runs the check that `message` names on this rank. Collective: all ranks run it."""
    from .gpu_attention import check_attention  # these take seconds to import
    from .gpu_module_call import ModelCalls

    device, subject = layouts.world.device, message.subject
    match message.name:
        case "device":
            return check_device(device)
        case "attention":
            return check_attention(device, subject.attention_tokens)
        case "syncs":
            return ModelCalls(subject, layouts).check_synchronisations()
        case "profile":
            return ModelCalls(subject, layouts).profile()
        case "fill memory":
            if layouts.world.rank == 0:
                fill_device_after_a_step()
            return []
        case _:
            raise RequestError(f"{message.name!r} is no check of a process.")


def check_device(device: torch.device, cuda: Any = None) -> list[Finding]:
    """Describes the device and judges its allocator. `cuda`: a substitute for torch.cuda in tests."""
    cuda = cuda or torch.cuda
    if device.type != "cuda":
        threads = torch.get_num_threads()
        return [
            Finding("device", "ok", f"the CPU, {threads} thread{'' if threads == 1 else 's'} of torch"),
            Finding("allocator", "skipped", f"{NO_GPU}: the allocator's back end is one of CUDA's"),
        ]
    known = cuda.get_device_properties(device)
    free, total = cuda.mem_get_info(device)
    named = "known" if str(getattr(known, "uuid", "")) else "not told by this torch"
    kind = "HIP" if torch.version.hip else "compute capability"
    return [
        Finding(
            "device",
            "ok",
            f"{known.name}, {kind} {known.major}.{known.minor}, {known.multi_processor_count} multiprocessors, "
            f"{free / 1e9:.1f} of {total / 1e9:.1f} GB free, UUID {named}",
        ),
        _allocator(cuda),
    ]


def _allocator(cuda: Any) -> Finding:
    backend = str(cuda.get_allocator_backend())
    settings = "; ".join(f"{name}={os.environ[name]}" for name in _SETTINGS if os.environ.get(name))
    finding = f"{backend}{f' ({settings})' if settings else ''}"
    if backend == NATIVE:
        return Finding("allocator", "ok", finding)
    return Finding(
        "allocator",
        "broken",
        f"{finding}: with NCCL beside it, memory runs out after a few steps",
        "take backend: out of PYTORCH_CUDA_ALLOC_CONF and PYTORCH_ALLOC_CONF, and report that a process had it",
    )


def fill_device_after_a_step() -> None:
    """Makes the next job run out of memory after its first step. It takes all of this rank's GPU memory; on the CPU it
    only raises, since other programs need that memory. It stops at the GPU's size, in case the driver would continue in
    host memory (WSL2's does)."""

    def fill(point: str, step: int) -> None:
        if (point, step) != ("step", 1):
            return
        heartbeat.observer = None
        allocated = []
        if torch.cuda.is_initialized():
            _, total = torch.cuda.mem_get_info()
            for _ in range(total // _PIECE):
                allocated.append(torch.empty(_PIECE, dtype=torch.uint8, device="cuda"))
        raise torch.OutOfMemoryError("on purpose: tried to allocate 20.00 GiB")

    heartbeat.observer = fill
