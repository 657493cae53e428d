"""LoRAs on the ranks as the parent sees them: each factor goes there once, then only what to do with it."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from ..errors import RequestError
from ..requests import PatchInfo
from ..wire import deadlines
from ..wire.protocol import ApplyPatches, Done, KeepFactors
from ..wire.transport import MAX_TENSORS
from ..wire.weight_patches import RecentSets, WeightPatches
from .group.exchange import AGREED_ERRORS, USER_ERRORS, Exchange, reports
from .group.phases import OnPhase, Phase, PhaseKind

NewExchange = Callable[[frozenset[str]], Exchange[Done]]  # takes the errors that leave the group usable
CHUNK_BYTES = 256 * 2**20  # of factors in one payload, which this process holds twice while it is made
_CHUNK_TENSORS = MAX_TENSORS // 2  # leaves room for their names in a payload's header


class LorasOnRanks:
    """The changes in place in one model on the ranks, and the factors that they keep for it. `model`: its number."""

    def __init__(self, model: int) -> None:
        self._model = model
        self._identity: str | None = ""  # None while nobody knows
        self._weights = 0
        self._held: set[str] = set()
        self._recent = RecentSets()

    def ensure(
        self, new_exchange: NewExchange, wanted: WeightPatches, model_bytes: int, on_phase: OnPhase
    ) -> PatchInfo:
        """Has every rank change its weights as `wanted`, and nothing else.

        Raises RequestError for changes that do not fit; the weights are those of before then.
        """
        if self._identity == wanted.identity:
            return PatchInfo(0.0, self._weights, 0, 0, cached=True)
        begun = time.perf_counter()
        on_phase(Phase(PhaseKind.APPLYING_LORAS if wanted.patches else PhaseKind.REMOVING_LORAS))
        sent = self._send_missing(new_exchange, wanted)
        description = torch.frombuffer(bytearray(wanted.description), dtype=torch.uint8)
        exchange = new_exchange(AGREED_ERRORS)
        try:
            exchange.send(ApplyPatches(self._model, wanted.identity), {"description": description})
            done = exchange.wait(lambda: deadlines.load_budget(model_bytes))
        except RequestError:
            raise  # the ranks still have what they had
        except BaseException:
            self._identity = None
            self._held.clear()
            self._recent.clear()
            raise
        changed = reports(done, lambda answer: answer.patch)
        self._identity, self._weights = wanted.identity, len(wanted.keys)
        self._held &= self._recent.applied(wanted.identity, wanted.digests)
        return PatchInfo(
            seconds=time.perf_counter() - begun,
            weights=self._weights,
            touched=max(patch.touched for patch in changed),
            bytes_sent=sent,
            cached=False,
        )

    def _send_missing(self, new_exchange: NewExchange, wanted: WeightPatches) -> int:
        sent = 0
        missing = {d: wanted.tensors[d] for d in sorted(wanted.digests - self._held)}
        for chunk in _chunks(missing):
            nbytes = sum(tensor.nbytes for tensor in chunk.values())
            exchange = new_exchange(USER_ERRORS)
            exchange.send(KeepFactors(self._model), chunk)
            exchange.wait(functools.partial(deadlines.load_budget, nbytes))
            self._held |= set(chunk)
            sent += nbytes
        return sent


def _chunks(tensors: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """In parts that a payload can carry."""
    chunk: dict[str, Tensor] = {}
    nbytes = 0
    for digest, tensor in tensors.items():
        if chunk and (len(chunk) == _CHUNK_TENSORS or nbytes + tensor.nbytes > CHUNK_BYTES):
            yield chunk
            chunk, nbytes = {}, 0
        chunk[digest] = tensor
        nbytes += tensor.nbytes
    if chunk:
        yield chunk
