"""Decoding and encoding on the ranks as the parent sees it: the weights go there once, then only latents or pixels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import Tensor

from ...devices import is_cpu
from ...errors import TransportError
from ...requests import LoadInfo
from ...wire import deadlines
from ...wire.decode_messages import Decode, DecodeInfo, DecodeResult, Encode, EncodeResult, VaeWeights
from ...wire.payloads import Tensors
from ...wire.protocol import Done, LoadVae, Message, Progress
from .exchange import AGREED_ERRORS, USER_ERRORS, Exchange, expect, reports
from .phases import OnPhase, Phase, PhaseKind

NewExchange = Callable[[frozenset[str]], Exchange[Done]]  # takes the errors that leave the group usable

PIXELS_PER_POSITION = 64  # of a latent, in most VAEs; the others have more


class VaeOnRanks:
    """The half of a VAE that the ranks of one sidecar hold, and what they do with it. `epoch`: of the group; a new one
    holds none."""

    def __init__(self, devices: tuple[str, ...]) -> None:
        self._devices = devices
        self._held: tuple[int, str, LoadInfo] | None = None  # epoch, identity, how it was loaded

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
        on_phase: OnPhase,
    ) -> DecodeResult:
        """As Sidecar.decode."""
        phase, message = PhaseKind.DECODING, Decode(vae.identity, shares)
        run = self._run(epoch, new_exchange, vae, phase, message, {"latent": latent}, on_step, on_phase)
        return DecodeResult(run.of("image"), run.info)

    def encode(
        self,
        epoch: int,
        new_exchange: NewExchange,
        vae: VaeWeights,
        pixels: Tensor,
        shares: tuple[float, ...],
        on_step: Callable[[int, int], None] | None,
        on_phase: OnPhase,
    ) -> EncodeResult:
        """As Sidecar.encode."""
        phase, message = PhaseKind.ENCODING, Encode(vae.identity, shares)
        run = self._run(epoch, new_exchange, vae, phase, message, {"pixels": pixels}, on_step, on_phase)
        return EncodeResult(run.of("latent"), run.info)

    def _run(
        self,
        epoch: int,
        new_exchange: NewExchange,
        vae: VaeWeights,
        phase: PhaseKind,
        message: Decode | Encode,
        tensors: Tensors,
        on_step: Callable[[int, int], None] | None,
        on_phase: OnPhase,
    ) -> _Run:
        load = self._ensure_held(epoch, new_exchange, vae, on_phase)

        def progress(rank: int, message: Message, tensors: Tensors | None) -> None:
            step = expect(rank, message, Progress)
            if on_step is not None:
                on_step(step.step, step.steps)

        on_phase(Phase(phase))
        (given,) = tensors.values()
        positions = given[0, 0].numel() // (1 if isinstance(message, Decode) else PIXELS_PER_POSITION)
        budget = deadlines.decode_budget(positions, is_cpu(self._devices))
        exchange = new_exchange(USER_ERRORS)
        exchange.send(message, tensors)
        runs = reports(exchange.wait(lambda: budget, progress), lambda answer: answer.decode)
        info = DecodeInfo(
            load=load,
            seconds=max(run.seconds for run in runs),
            rows=tuple(run.rows for run in runs),
            bytes_sent=tuple(run.bytes_sent for run in runs),
            peak_bytes=tuple(run.peak_bytes for run in runs),
            compute_dtype=runs[0].compute_dtype,
        )
        return _Run(exchange.result, info)

    def _ensure_held(
        self, epoch: int, new_exchange: NewExchange, vae: VaeWeights, on_phase: OnPhase
    ) -> LoadInfo:
        if self._held is not None and self._held[:2] == (epoch, vae.identity):
            return replace(self._held[2], seconds=0.0, cached=True)
        on_phase(Phase(PhaseKind.SENDING_VAE))
        self._held = None
        tensors = vae.tensors()
        budget = deadlines.load_budget(sum(tensor.nbytes for tensor in tensors.values()))
        exchange = new_exchange(AGREED_ERRORS)
        exchange.send(LoadVae(vae.identity, vae.comfyui, vae.metadata, vae.encodes), tensors)
        loads = reports(exchange.wait(lambda: budget), lambda answer: answer.load)
        info = replace(loads[0], seconds=max(load.seconds for load in loads))
        self._held = (epoch, vae.identity, info)
        return info


@dataclass(frozen=True)
class _Run:
    result: Tensors
    info: DecodeInfo

    def of(self, name: str) -> Tensor:
        """What the ranks ended it with, which has that name."""
        if set(self.result) != {name}:
            raise TransportError(f"the processes ended a decode or encode without the {name}")
        return self.result[name]
