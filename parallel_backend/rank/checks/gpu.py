"""One rank that runs checks: `python -m parallel_backend.rank.checks.gpu`; see wire/checks/gpu_check.py."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ...wire.checks.findings import NO_GPU, Finding
from ...wire.checks.gpu_check import CheckSubject, Run, serve

if TYPE_CHECKING:  # imported when they are first needed: they take seconds
    import torch

    from .gpu_module_call import ModelCalls

# torch's default allocator. With the other one, cudaMallocAsync, NCCL holds on to memory until none is left.
NATIVE = "native"
_SETTINGS = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


def make_checks(subject: CheckSubject, rank: int, rendezvous: str) -> Mapping[str, Run]:
    """Joins the process group of the ranks, unless there is only one; returns the checks by name."""
    import torch

    from ...engine.comm.groups import World
    from .gpu_attention import check_attention

    name = subject.devices[rank]
    device = torch.device("cpu" if name.startswith("cpu") else name)
    world = World(
        rank=rank,
        world_size=len(subject.devices),
        device=device,
        backend="nccl" if subject.on_gpus else "gloo",
        store_path=rendezvous,
    )

    @functools.cache
    def calls() -> ModelCalls:
        from .gpu_module_call import ModelCalls  # takes seconds to import

        return ModelCalls(subject, world)

    return {
        "device": lambda: check_device(device),
        "attention": lambda: check_attention(device, subject.attention_tokens),
        "syncs": lambda: calls().check_synchronisations(),
        "profile": lambda: calls().profile(),
    }


def check_device(device: torch.device, cuda: Any = None) -> list[Finding]:
    """Describes the device and judges its allocator. `cuda`: a substitute for torch.cuda in tests."""
    import torch

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


if __name__ == "__main__":
    serve(make_checks)
