"""One stage of a pipeline: takes what the stage before hands on, computes its chunks of blocks, hands on the result.

A stage holds one or two chunks (stages.py); an image passes chunk 0 of all stages, then chunk 1. Items go in turns of
at least as many as there are stages: all of a turn through chunk 0, then all through chunk 1. So no stage waits for
another in the steady state, and each rank knows the order of all messages beforehand.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ...layout import slice_of
from ...models.flux.module import FluxModel, Residuals
from ...models.flux.packing import text_ids
from ...requests import Conditioning, Extras
from ..attention.kv_cache import KVCache
from ..attention.native import NativeAttention
from ..collectives import Traffic
from ..groups import Layout
from ..image_tokens import ResidualShares, mask_in_order
from ..patches import PatchPlan
from ..token_split import TokenPlan
from .p2p import P2PChannel, PendingRecv

CHUNKS = 2  # the most that a stage holds


@dataclass(frozen=True, eq=False)
class RowShard:
    """One row as this pipeline computes it. `number`: of the row among all; sigma [1] float32.

    `tokens`: this rank's image tokens, patch after patch; `ids` [n, 3]: of these. `extras`: of whole images only.
    """

    number: int
    prompt: Conditioning
    sigma: Tensor
    plan: PatchPlan
    tokens: Tensor
    ids: Tensor
    extras: Extras = field(default_factory=Extras)


@dataclass(frozen=True, eq=False)
class WorkItem:
    """What flows: some rows, whole (`patch` None) or one patch of each. `evaluation` numbers a run's model calls."""

    cuts: tuple[RowShard, ...]
    patch: int | None = None
    evaluation: int = 0

    def needs(self, other: WorkItem) -> bool:
        """Whether it starts from what `other` gives."""
        return self.patch == other.patch and self.evaluation == other.evaluation + 1

    def plan(self, cut: RowShard) -> TokenPlan:
        return cut.plan.whole if self.patch is None else cut.plan.patches[self.patch]


# The tokens [1, n, channels] with which a row starts, on the first stage; where those go that the last one gives.
Enter = Callable[[WorkItem, RowShard], Tensor]
Leave = Callable[[WorkItem, RowShard, Tensor], None]


class Stage:
    """This rank's stage. `onward` leads to the next stage, `back` from the last one to the first."""

    def __init__(
        self, model: FluxModel, layout: Layout, attention: NativeAttention, traffic: Traffic
    ) -> None:
        self._model = model
        self._attention = attention
        self._sequence = layout.sequence
        self._pipe = layout.pipe
        self.onward = P2PChannel(layout.pipe, traffic)
        self.back = P2PChannel(layout.return_group, traffic)
        self.memory = KVCache(layout.ring.index, layout.ring.size)
        self.remembers = False  # whether whole images leave their keys and values for patches

    @property
    def is_first(self) -> bool:
        return self._pipe.index == 0

    @property
    def is_last(self) -> bool:
        return self._pipe.index == self._pipe.size - 1

    @property
    def device(self) -> torch.device:
        return self._model.device

    @property
    def output_channels(self) -> int:
        """Of an image token that leaves the model."""
        return self._model.file.dims.out_channels

    def empty_output(self, item: WorkItem, cut: RowShard) -> Tensor:
        """An empty [1, n, 64] float32: this rank's image tokens as they leave the last stage."""
        return torch.empty(
            1, item.plan(cut).image[self._sequence.index], self.output_channels, device=self.device
        )

    def turn(
        self,
        items: Sequence[WorkItem],
        enter: Enter,
        leave: Leave,
        *,
        before: Callable[[int, WorkItem], bool] = lambda chunk, item: True,
        between: Callable[[], None] = lambda: None,
    ) -> None:
        """Takes `items`, none of which needs another, through this stage.

        `before(chunk, item)` is called for each of CHUNKS and each item, and says whether to compute; `between` once
        the first stage has asked for all that comes back to it within the turn.
        """
        chunks = len(self._model.chunks)
        coming = [
            (chunk, item, cut)
            for chunk in range(1 if self.is_first else 0, chunks)
            for item in items
            for cut in item.cuts
        ]
        asked: list[PendingRecv] = []

        def ask(count: int) -> None:
            for chunk, item, cut in coming[:count]:
                asked.append(self._ask(chunk, item, cut))
            del coming[:count]

        for chunk in range(CHUNKS):
            if self.is_first and chunk == 1:
                ask(len(coming))
                between()
            for item in items:
                compute = before(chunk, item)
                for cut in item.cuts if chunk < chunks else ():
                    inputs = None
                    if not (self.is_first and chunk == 0):
                        ask(2 - len(asked))  # the next message travels while this one is computed
                        inputs = self._split(item, cut, asked.pop(0).taken())
                    elif compute:
                        inputs = self._entering(item, cut, enter)
                    outputs = self._through(chunk, item, cut, *inputs) if compute else None
                    self._hand_on(chunk, item, cut, outputs, leave)
        self.onward.end_turn()
        self.back.end_turn()

    def settle(self) -> None:
        """Waits until everything that was sent has left."""
        self.onward.settle()
        self.back.settle()

    def _entering(self, item: WorkItem, cut: RowShard, enter: Enter) -> tuple[Tensor, Tensor]:
        """(image tokens, text) of this rank that go into the first chunk."""
        return enter(item, cut), cut.prompt.context[:, slice_of(item.plan(cut).text, self._sequence.index)]

    def _ask(self, chunk: int, item: WorkItem, cut: RowShard) -> PendingRecv:
        message = self._message(item, cut)
        if self.is_first:
            return self.back.receive(message, self._pipe.size - 1)
        return self.onward.receive(message, self._pipe.index - 1)

    def _message(self, item: WorkItem, cut: RowShard) -> Tensor:
        """An empty [t + n, 1, hidden]: text and image tokens of this rank between two chunks."""
        tokens = item.plan(cut).lengths[self._sequence.index]
        shape = (tokens, 1, self._model.file.dims.hidden)
        return torch.empty(shape, dtype=self._model.compute_dtype, device=self._model.device)

    def _split(self, item: WorkItem, cut: RowShard, message: Tensor) -> tuple[Tensor, Tensor]:
        text = item.plan(cut).text[self._sequence.index]
        return message[text:].transpose(0, 1), message[:text].transpose(0, 1)

    def _through(
        self, chunk: int, item: WorkItem, cut: RowShard, image: Tensor, text: Tensor
    ) -> tuple[Tensor, Tensor]:
        plan = item.plan(cut)
        self._attention.plan = plan
        self._attention.memory = self._remembering(chunk, item, cut)
        self._attention.mask = self._mask(cut)
        return self._model.through(
            chunk,
            img_tokens=image,
            context=text,
            pooled=cut.prompt.pooled,
            sigma=cut.sigma,
            guidance=cut.prompt.guidance,
            img_ids=cut.ids if item.patch is None else cut.ids[self._own(item.patch, cut)],
            txt_ids=text_ids(text.shape[1], self._model.device),
            residuals=self._residuals(cut),
        )

    def _mask(self, cut: RowShard) -> Tensor | None:
        if cut.extras.mask is None:
            return None
        return mask_in_order(
            cut.extras.mask, cut.plan.whole_order, self._model.compute_dtype, self._model.device
        )

    def _residuals(self, cut: RowShard) -> Residuals | None:
        if not cut.extras.residuals:
            return None
        own, count = cut.tokens.cpu(), sum(cut.plan.whole.image)

        return ResidualShares(cut.extras.residuals, own, count, self._model.device, self._model.compute_dtype)

    def _own(self, patch: int, cut: RowShard) -> slice:
        """Where a patch's tokens lie among this rank's."""
        return slice_of(tuple(p.image[self._sequence.index] for p in cut.plan.patches), patch)

    def _remembering(self, chunk: int, item: WorkItem, cut: RowShard):
        if item.patch is not None:
            return self.memory.patch(cut.number, chunk, cut.plan, item.patch, first=item.evaluation == 0)
        if self.remembers:
            return self.memory.whole(cut.number, chunk, cut.plan, self._model.device)
        return None

    def _hand_on(
        self, chunk: int, item: WorkItem, cut: RowShard, outputs: tuple[Tensor, Tensor] | None, leave: Leave
    ) -> None:
        """`outputs`: (image, text), or None where nothing was computed and the message is only due."""
        if self.is_last and chunk == len(self._model.chunks) - 1:
            leave(item, cut, self.empty_output(item, cut).zero_() if outputs is None else outputs[0].float())
            return
        if outputs is None:
            message = self._message(item, cut).zero_()
        else:
            image, text = outputs
            message = torch.cat([text, image], dim=1).transpose(0, 1)
        if self.is_last:
            self.back.send(message, 0)
        else:
            self.onward.send(message, self._pipe.index + 1)
