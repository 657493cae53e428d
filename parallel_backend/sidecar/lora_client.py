"""LoRAs on the ranks as the parent sees them: each factor goes there once, then only what to do with it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from ..errors import RequestError, TransportError
from ..requests import PatchInfo
from ..wire import deadlines
from ..wire.protocol import ApplyPatches, Done, KeepFactors, Message
from ..wire.transport import MAX_TENSORS, pack_tensors
from ..wire.weight_patches import RecentSets, WeightPatches
from .exchange import USER_ERRORS, Exchange

NewExchange = Callable[[frozenset[str]], Exchange]  # takes the errors that leave the group usable
CHUNK_BYTES = 256 * 2**20  # of factors in one payload, which this process holds twice while it is made
_CHUNK_TENSORS = MAX_TENSORS // 2  # leaves room for their names in a payload's header


class LorasOnRanks:
    """What the ranks of one sidecar hold beside the file: the changes in place, and the factors they keep."""

    def __init__(self) -> None:
        self._identity: str | None = ""  # None while nobody knows
        self._weights = 0
        self._held: set[str] = set()
        self._recent = RecentSets()

    def ensure(
        self,
        new_exchange: NewExchange,
        wanted: WeightPatches,
        model_bytes: int,
        on_phase: Callable[[str], None] | None,
    ) -> PatchInfo:
        """Has every rank change its weights as `wanted`, and nothing else.

        Raises RequestError for changes that do not fit; the weights are those of before then.
        """
        if self._identity == wanted.identity:
            return PatchInfo(0.0, self._weights, 0, 0, cached=True)
        begun = time.perf_counter()
        if on_phase is not None:
            on_phase("applying LoRAs" if wanted.patches else "taking LoRAs out")
        sent = self._send_missing(new_exchange, wanted)
        description = torch.frombuffer(bytearray(wanted.description), dtype=torch.uint8)
        budget = deadlines.load_budget(model_bytes)
        # Ranks agree before they report, so an out-of-memory there leaves no collective half done.
        exchange = new_exchange(USER_ERRORS | {"OutOfMemory"})
        try:
            done = _ask(exchange, ApplyPatches(wanted.identity), {"description": description}, budget)
        except RequestError:
            raise  # the ranks still have what they had
        except BaseException:
            self._identity = None
            self._held.clear()
            self._recent.clear()
            raise
        patches = [answer.patch for answer in done]
        if None in patches:
            raise TransportError("a rank changed its weights without saying how")
        self._identity, self._weights = wanted.identity, len(wanted.keys)
        self._held &= self._recent.applied(wanted.identity, wanted.digests)
        return PatchInfo(
            seconds=time.perf_counter() - begun,
            weights=self._weights,
            touched=max(patch.touched for patch in patches),
            bytes_sent=sent,
            cached=False,
        )

    def _send_missing(self, new_exchange: NewExchange, wanted: WeightPatches) -> int:
        sent = 0
        missing = {d: wanted.tensors[d] for d in sorted(wanted.digests - self._held)}
        for chunk in _chunks(missing):
            nbytes = sum(tensor.nbytes for tensor in chunk.values())
            _ask(new_exchange(USER_ERRORS), KeepFactors(), chunk, deadlines.load_budget(nbytes))
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


def _ask(exchange: Exchange, message: Message, tensors: dict[str, Tensor], budget: float) -> list[Done]:
    """Every rank's answer, in rank order."""
    payload = pack_tensors(tensors)
    try:
        exchange.send(message, payload)
    finally:
        os.close(payload)
    done = exchange.wait(lambda: budget, _refuse)
    return [done[rank] for rank in sorted(done)]


def _refuse(rank: int, message: Message, tensors: dict[str, Tensor] | None) -> None:
    raise TransportError(f"rank {rank} sent {type(message).__name__} while it changes its weights")
