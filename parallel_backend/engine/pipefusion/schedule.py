"""Patches on their way round the pipeline: each enters a model call as soon as the call before has given it back."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from ...layout import slice_of
from ..attention.kv_cache import KVCache
from ..comm.collectives import all_gather
from ..comm.groups import Layout
from ..comm.traffic_counter import Traffic
from ..stages.p2p import PendingRecv
from .stage import RowShard, Stage, WorkItem


class Sampling(Protocol):
    """The maker of latents from velocities while patches flow; only ranks of the first stage enter and leave."""

    def enter(self, patch: slice) -> Tensor:
        """The latent's tokens [B, n, channels] of a patch that go into its next model call."""

    def leave(self, patch: slice, velocities: list[Tensor]) -> None:
        """Takes what the model made of them, [B, n, channels] float32 for each prompt."""

    def is_stopped(self) -> bool:
        """Asked on every rank equally often, twice a patch; all get the same answers."""


class PipeFusionSchedule:
    """One run of patches on one rank. `row_shards`: the rows of this pipeline; `shares`: how many each pipeline has;
    `batch`: images, each a row for every prompt; `patches`: image tokens of each patch; `cache`: what whole images
    before it have left."""

    def __init__(
        self,
        stage: Stage,
        layout: Layout,
        traffic: Traffic,
        sampling: Sampling,
        row_shards: Sequence[RowShard],
        shares: tuple[int, ...],
        batch: int,
        patches: tuple[int, ...],
        cache: KVCache,
    ) -> None:
        self._stage = stage
        self._layout = layout
        self._traffic = traffic
        self._sampling = sampling
        self._row_shards = row_shards
        self._shares = shares
        self._batch = batch
        self._patches = patches
        self._cache = cache
        self._stopped = False
        self._returning: dict[WorkItem, list[PendingRecv]] = {}  # in the order in which they come back
        self._entered: dict[WorkItem, Tensor] = {}

    def run(self, sigmas: Sequence[Tensor]) -> bool:
        """False when it was stopped."""
        # As many items as stages would do if all took exactly as long; twice as many leave time for a late message.
        for items in rounds(self._items(sigmas), 2 * self._layout.pipe.size):
            self._stage.run_round(
                items,
                self._enter,
                leave=lambda item, row, image: self._stage.back.send(image, 0),
                cache=self._cache,
                before=self._before,
                between=functools.partial(self._expect, items),
            )
            if self._stopped:
                break
        for item in list(self._returning):
            self._take_back(item)
        self._stage.settle()
        return not self._stopped

    def _items(self, sigmas: Sequence[Tensor]) -> Iterator[WorkItem]:
        for evaluation, sigma in enumerate(sigmas):
            rows = tuple(replace(row, sigma=sigma.reshape(1)) for row in self._row_shards)
            for patch in range(len(self._patches)):
                yield WorkItem(rows, patch, evaluation)

    def _before(self, chunk: int, item: WorkItem) -> bool:
        self._stopped |= self._sampling.is_stopped()
        if self._stage.is_first and chunk == 0:
            for earlier in [other for other in self._returning if item.needs(other)]:
                self._take_back(earlier)
            if not self._stopped:
                self._entered[item] = self._sampling.enter(self._span(item))
        return not self._stopped

    def _span(self, item: WorkItem) -> slice:
        """The image tokens of a patch."""
        assert item.patch is not None, "whole images do not flow"
        return slice_of(self._patches, item.patch)

    def _enter(self, item: WorkItem, row: RowShard) -> Tensor:
        image = row.number % self._batch
        own = slice_of(item.plan(row).image, self._layout.sequence.index)
        return self._entered[item][image : image + 1, own]

    def _expect(self, items: Sequence[WorkItem]) -> None:
        """Asks for what the last stage will return of this round."""
        last = self._layout.pipe.size - 1
        for item in items:
            self._entered.pop(item, None)
            self._returning[item] = [
                self._stage.back.receive(self._stage.empty_output(item, row), last) for row in item.rows
            ]

    def _take_back(self, item: WorkItem) -> None:
        """Waits for the velocities of a patch, brings those of all rows together and hands them to the sampler."""
        shares = [arriving.taken() for arriving in self._returning.pop(item)]
        if self._stopped:
            return
        sequence = self._layout.sequence
        complete = []
        for row, image in zip(item.rows, shares, strict=True):
            if sequence.size > 1:
                sizes = item.plan(row).image
                image = all_gather(image.transpose(0, 1), sizes, sequence, self._traffic).transpose(0, 1)
            complete.append(image)
        span = self._span(item)
        nothing = self._stage.empty_patch(span.stop - span.start)
        rows = all_gather(torch.cat(complete or [nothing]), self._shares, self._layout.row, self._traffic)
        self._sampling.leave(span, list(rows.split(self._batch)))


def rounds(items: Iterator[WorkItem], size: int) -> Iterator[list[WorkItem]]:
    """`items` in order, up to `size` to a round, but none beside one that it needs."""
    together: list[WorkItem] = []
    for item in items:
        if len(together) == size or any(item.needs(other) for other in together):
            yield together
            together = []
        together.append(item)
    if together:
        yield together
