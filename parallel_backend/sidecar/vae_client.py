"""Decoding on the ranks as the parent sees it: the weights go there once, then only latents."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace

from torch import Tensor

from ..devices import is_cpu
from ..errors import TransportError
from ..requests import LoadInfo
from ..wire import deadlines
from ..wire.decode_messages import DecodeInfo, DecodeResult, VaeWeights
from ..wire.protocol import Decode, Done, LoadVae, Message, Progress
from ..wire.transport import pack_tensors
from .exchange import USER_ERRORS, Exchange, OnMessage

NewExchange = Callable[[frozenset[str]], Exchange]  # takes the errors that leave the group usable


class VaeOnRanks:
    """Which VAE the ranks of one sidecar hold, and decoding with it. `epoch`: of the group; a new one holds nothing."""

    def __init__(self, devices: tuple[str, ...]) -> None:
        self._devices = devices
        self._held: tuple[int, str] | None = None  # epoch and identity
        self._info: LoadInfo | None = None

    def forget(self) -> None:
        """The ranks have discarded it."""
        self._held = None

    def decode(
        self,
        epoch: int,
        new_exchange: NewExchange,
        vae: VaeWeights,
        latent: Tensor,
        shares: tuple[float, ...],
        on_step: Callable[[int, int], None] | None,
        on_phase: Callable[[str], None] | None,
    ) -> DecodeResult:
        """As Sidecar.decode."""
        load = self._ensure_held(epoch, new_exchange, vae, on_phase)

        def progress(rank: int, message: Message, tensors: dict[str, Tensor] | None) -> None:
            if not isinstance(message, Progress):
                raise TransportError(f"rank {rank} sent {type(message).__name__} where Progress was due")
            if on_step is not None:
                on_step(message.step, message.steps)

        if on_phase is not None:
            on_phase("decoding")
        positions = latent.shape[2] * latent.shape[3]
        budget = deadlines.decode_budget(positions, is_cpu(self._devices))
        exchange = new_exchange(USER_ERRORS)
        runs = [
            done.decode
            for done in _ask(exchange, Decode(vae.identity, shares), {"latent": latent}, budget, progress)
        ]
        result = exchange.result or {}
        if set(result) != {"image"} or None in runs:
            raise TransportError("the ranks ended a decode without an image, or without saying how it ran")
        info = DecodeInfo(
            load=load,
            seconds=max(run.seconds for run in runs),
            rows=tuple(run.rows for run in runs),
            bytes_sent=tuple(run.bytes_sent for run in runs),
            peak_bytes=tuple(run.peak_bytes for run in runs),
            compute_dtype=runs[0].compute_dtype,
        )
        return DecodeResult(result["image"], info)

    def _ensure_held(
        self,
        epoch: int,
        new_exchange: NewExchange,
        vae: VaeWeights,
        on_phase: Callable[[str], None] | None,
    ) -> LoadInfo:
        if self._held == (epoch, vae.identity):
            return replace(self._info, seconds=0.0, cached=True)
        if on_phase is not None:
            on_phase("sending the VAE to the ranks")
        self._held = None
        tensors = vae.tensors()
        budget = deadlines.load_budget(sum(tensor.nbytes for tensor in tensors.values()))
        # Ranks agree on a load before they report, so an out-of-memory there leaves no collective half done.
        exchange = new_exchange(USER_ERRORS | {"OutOfMemory"})
        loads = [done.load for done in _ask(exchange, LoadVae(vae.identity), tensors, budget, _refuse)]
        if None in loads:
            raise TransportError("a rank took a VAE without saying how it loaded it")
        self._info = replace(loads[0], seconds=max(load.seconds for load in loads))
        self._held = (epoch, vae.identity)
        return self._info


def _ask(
    exchange: Exchange, message: Message, tensors: dict[str, Tensor], budget: float, on_message: OnMessage
) -> list[Done]:
    """Every rank's answer, in rank order."""
    payload = pack_tensors(tensors)
    try:
        exchange.send(message, payload)
    finally:
        os.close(payload)
    done = exchange.wait(lambda: budget, on_message)
    return [done[rank] for rank in sorted(done)]


def _refuse(rank: int, message: Message, tensors: dict[str, Tensor] | None) -> None:
    raise TransportError(f"rank {rank} sent {type(message).__name__} while it loads a VAE")
