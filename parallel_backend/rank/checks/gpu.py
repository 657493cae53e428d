"""One rank that runs checks: `python -m parallel_backend.rank.checks.gpu`; see wire/checks/gpu_check.py."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING

from ...wire.checks.gpu_check import CheckSubject, Run, serve

if TYPE_CHECKING:
    from .gpu_module_call import ModelCalls


def make_checks(subject: CheckSubject, rank: int, rendezvous: str) -> Mapping[str, Run]:
    """Joins the process group of the ranks, unless there is only one; returns the checks by name."""
    import torch

    from ...engine.comm.groups import World
    from .gpu_attention import check_attention
    from .gpu_device import check_device

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


if __name__ == "__main__":
    serve(make_checks)
