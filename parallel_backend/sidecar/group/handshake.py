"""The handshake with the ranks of a newly spawned group, until all of them are ready."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ...cluster.handshake import versions
from ...errors import RankFailed
from ...wire import deadlines
from ...wire.payloads import Tensors
from ...wire.protocol import NO_REQUEST, Hello, Message, Setup
from .exchange import Exchange, expect
from .supervisor import RankGroup


def join_ranks(group: RankGroup, cancelled: Callable[[], bool]) -> None:
    """Sends every rank its Setup and waits until the process group is ready. Raises the error of a rank that fails."""
    exchange = Exchange(group, NO_REQUEST, cancelled, survivable=frozenset())

    def greet(rank: int, message: Message, tensors: Tensors | None) -> None:
        _check_versions(rank, expect(rank, message, Hello))
        setup = Setup(
            rank=rank,
            world_size=group.world_size,
            devices=group.devices,
            rendezvous=group.rendezvous,
            backend="nccl" if all(device.startswith("cuda") for device in group.devices) else "gloo",
            deterministic=torch.are_deterministic_algorithms_enabled(),
        )
        exchange.send_to(rank, setup)

    exchange.wait(lambda: deadlines.START, greet)


def _check_versions(rank: int, hello: Hello) -> None:
    ours, theirs = versions(), (hello.protocol, hello.python, hello.torch)
    if ours != theirs:
        raise RankFailed(
            rank,
            f"it runs protocol {theirs[0]}, Python {theirs[1]}, torch {theirs[2]}, but ComfyUI runs protocol "
            f"{ours[0]}, Python {ours[1]}, torch {ours[2]}; restart ComfyUI after an update.",
            reason="version",
        )
