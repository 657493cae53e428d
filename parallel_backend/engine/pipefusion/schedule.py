"""Patches on their way round the pipeline: each enters a model call as soon as the call before has given it back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from ...layout import slice_of
from ..collectives import Traffic, all_gather
from ..groups import Layout
from .p2p import PendingRecv
from .stage import RowShard, Stage, WorkItem


class Sampling(Protocol):
    """Who makes latents of velocities while patches flow; only ranks of the first stage enter and leave."""

    def enter(self, patch: slice) -> Tensor:
        """The latent's tokens [B, n, 64] of a patch that go into its next model call."""

    def leave(self, patch: slice, velocities: list[Tensor]) -> None:
        """What the model made of them, [B, n, 64] float32 for each prompt."""

    def is_stopped(self) -> bool:
        """Asked on every rank equally often, twice a patch; all get the same answers."""


class PipeFusionSchedule:
    """One run of patches on one rank. `cuts`: the rows of this pipeline; `shares`: how many each pipeline has;
    `batch`: images, each a row for every prompt; `patches`: image tokens of each patch."""

    def __init__(
        self,
        stage: Stage,
        layout: Layout,
        traffic: Traffic,
        sampling: Sampling,
        cuts: Sequence[RowShard],
        shares: tuple[int, ...],
        batch: int,
        patches: tuple[int, ...],
    ) -> None:
        self._stage = stage
        self._layout = layout
        self._traffic = traffic
        self._sampling = sampling
        self._cuts = cuts
        self._shares = shares
        self._batch = batch
        self._patches = patches
        self._stopped = False
        self._returning: dict[WorkItem, list[PendingRecv]] = {}  # in the order in which they come back
        self._entered: dict[WorkItem, Tensor] = {}

    def run(self, sigmas: Sequence[Tensor]) -> bool:
        """False when it was stopped."""
        # As many items as stages would do if all took exactly as long; twice as many leave time for a late message.
        for turn in turns(self._items(sigmas), 2 * self._layout.pipe.size):
            self._stage.turn(
                turn,
                self._enter,
                leave=lambda item, cut, image: self._stage.back.send(image, 0),
                before=self._before,
                between=lambda turn=turn: self._expect(turn),
            )
            if self._stopped:
                break
        for item in list(self._returning):
            self._take_back(item)
        self._stage.settle()
        return not self._stopped

    def _items(self, sigmas: Sequence[Tensor]) -> Iterator[WorkItem]:
        for evaluation, sigma in enumerate(sigmas):
            cuts = tuple(replace(cut, sigma=sigma.reshape(1)) for cut in self._cuts)
            for patch in range(len(self._patches)):
                yield WorkItem(cuts, patch, evaluation)

    def _before(self, chunk: int, item: WorkItem) -> bool:
        self._stopped |= self._sampling.is_stopped()
        if self._stage.is_first and chunk == 0:
            for earlier in [other for other in self._returning if item.needs(other)]:
                self._take_back(earlier)
            if not self._stopped:
                self._entered[item] = self._sampling.enter(slice_of(self._patches, item.patch))
        return not self._stopped

    def _enter(self, item: WorkItem, cut: RowShard) -> Tensor:
        image = cut.number % self._batch
        own = slice_of(item.plan(cut).image, self._layout.sequence.index)
        return self._entered[item][image : image + 1, own]

    def _expect(self, turn: Sequence[WorkItem]) -> None:
        """Asks for what the last stage will return of this turn."""
        last = self._layout.pipe.size - 1
        for item in turn:
            self._entered.pop(item, None)
            self._returning[item] = [
                self._stage.back.receive(self._stage.empty_output(item, cut), last) for cut in item.cuts
            ]

    def _take_back(self, item: WorkItem) -> None:
        """Waits for the velocities of a patch, brings those of all rows together and hands them to the sampler."""
        shares = [arriving.taken() for arriving in self._returning.pop(item)]
        if self._stopped:
            return
        sequence, row = self._layout.sequence, self._layout.row
        complete = []
        for cut, image in zip(item.cuts, shares, strict=True):
            if sequence.size > 1:
                sizes = item.plan(cut).image
                image = all_gather(image.transpose(0, 1), sizes, sequence, self._traffic).transpose(0, 1)
            complete.append(image)
        nothing = torch.empty(
            0, self._patches[item.patch], self._stage.output_channels, device=self._stage.device
        )
        rows = all_gather(torch.cat(complete or [nothing]), self._shares, row, self._traffic)
        self._sampling.leave(slice_of(self._patches, item.patch), list(rows.split(self._batch)))


def turns(items: Iterator[WorkItem], size: int) -> Iterator[list[WorkItem]]:
    """`items` in order, up to `size` to a turn, but none beside one that it needs."""
    turn: list[WorkItem] = []
    for item in items:
        if len(turn) == size or any(item.needs(other) for other in turn):
            yield turn
            turn = []
        turn.append(item)
    if turn:
        yield turn
