"""One stage of a pipeline: takes what the stage before hands on, computes its chunks of blocks, hands on the result.

A stage holds one or two chunks (layout.split_blocks); an image passes chunk 0 of all stages, then chunk 1. Items go in
rounds of at least as many as there are stages: all of a round through chunk 0, then all through chunk 1. So no stage
waits for another in the steady state, and each rank knows the order of all messages beforehand.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ...layout import slice_of
from ...models.base import Residuals, TokenModel, TokenShare
from ...requests import Conditioning, Extras
from ..attention.kv_cache import KVCache, KVRecorder
from ..attention.native import NativeAttention
from ..blocks.compile import Blocks
from ..comm.groups import Layout
from ..comm.traffic_counter import Traffic
from ..extras import OrderedMasks, ResidualShares
from ..patches import PatchPlan, index_of
from ..stages.p2p import P2PChannel, PendingRecv
from ..token_split import TokenPlan

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
    """Some rows on their way, whole (`patch` None) or one patch of each. `evaluation` numbers a run's model calls."""

    rows: tuple[RowShard, ...]
    patch: int | None = None
    evaluation: int = 0

    def needs(self, other: WorkItem) -> bool:
        """Whether it starts from what `other` gives."""
        return self.patch == other.patch and self.evaluation == other.evaluation + 1

    def plan(self, row: RowShard) -> TokenPlan:
        return row.plan.whole if self.patch is None else row.plan.patches[self.patch]


# The tokens [1, n, channels] with which a row starts, on the first stage; where those go that the last one gives.
Enter = Callable[[WorkItem, RowShard], Tensor]
Leave = Callable[[WorkItem, RowShard, Tensor], None]


class Stage:
    """This rank's stage. `onward` leads to the next stage, `back` from the last one to the first."""

    def __init__(
        self,
        model: TokenModel,
        layout: Layout,
        attention: NativeAttention,
        traffic: Traffic,
        blocks: Blocks,
    ) -> None:
        self._model = model
        self._attention = attention
        self._blocks = blocks
        self._masks = OrderedMasks()
        self._sequence = layout.sequence
        self._pipe = layout.pipe
        self.onward = P2PChannel(layout.pipe, traffic)
        self.back = P2PChannel(layout.return_group, traffic)
        self.kernel = attention.wanted_kernel  # that computed last

    @property
    def is_first(self) -> bool:
        return self._pipe.index == 0

    @property
    def is_last(self) -> bool:
        return self._pipe.index == self._pipe.size - 1

    @property
    def device(self) -> torch.device:
        return self._model.device

    def empty_output(self, item: WorkItem, row: RowShard) -> Tensor:
        """An empty [1, n, channels] float32: this rank's image tokens as they leave the last stage."""
        tokens = item.plan(row).image[self._sequence.index]
        return torch.empty(1, tokens, self._model.token_channels, device=self.device)

    def empty_patch(self, tokens: int) -> Tensor:
        """No row of image tokens as they leave the last stage: [0, tokens, channels] float32."""
        return torch.empty(0, tokens, self._model.token_channels, device=self.device)

    def run_round(
        self,
        items: Sequence[WorkItem],
        enter: Enter,
        leave: Leave,
        *,
        cache: KVCache | None = None,
        before: Callable[[int, WorkItem], bool] = lambda chunk, item: True,
        between: Callable[[], None] = lambda: None,
    ) -> None:
        """Takes `items`, none of which needs another, through this stage.

        `cache`: where whole images leave their keys and values for patches, and patches find them;
        `before(chunk, item)` is called for each of CHUNKS and each item, and says whether to compute;
        `between` once the first stage has asked for all that comes back to it within the round.
        """
        chunks = len(self._model.chunks)
        coming = [
            (chunk, item, row)
            for chunk in range(1 if self.is_first else 0, chunks)
            for item in items
            for row in item.rows
        ]
        asked: list[PendingRecv] = []

        def ask(count: int) -> None:
            for chunk, item, row in coming[:count]:
                asked.append(self._ask(chunk, item, row))
            del coming[:count]

        for chunk in range(CHUNKS):
            if self.is_first and chunk == 1:
                ask(len(coming))
                between()
            for item in items:
                compute = before(chunk, item)
                for row in item.rows if chunk < chunks else ():
                    outputs = None
                    if not (self.is_first and chunk == 0):
                        ask(2 - len(asked))  # the next message travels while this one is computed
                        inputs = self._split(item, row, asked.pop(0).taken())
                    elif compute:
                        inputs = self._entering(item, row, enter)
                    if compute:
                        outputs = self._through(chunk, item, row, *inputs, cache)
                    self._hand_on(chunk, item, row, outputs, leave)
        self.onward.end_round()
        self.back.end_round()

    def settle(self) -> None:
        """Waits until everything that was sent has left."""
        self.onward.settle()
        self.back.settle()

    def _entering(self, item: WorkItem, row: RowShard, enter: Enter) -> tuple[Tensor, Tensor]:
        """(image tokens, text) of this rank that go into the first chunk."""
        return enter(item, row), row.prompt.context[:, slice_of(item.plan(row).text, self._sequence.index)]

    def _ask(self, chunk: int, item: WorkItem, row: RowShard) -> PendingRecv:
        message = self._message(item, row)
        if self.is_first:
            return self.back.receive(message, self._pipe.size - 1)
        return self.onward.receive(message, self._pipe.index - 1)

    def _message(self, item: WorkItem, row: RowShard) -> Tensor:
        """An empty [t + n, 1, width]: text and image tokens of this rank between two chunks."""
        tokens = item.plan(row).lengths[self._sequence.index]
        shape = (tokens, 1, self._model.width)
        return torch.empty(shape, dtype=self._model.compute_dtype, device=self._model.device)

    def _split(self, item: WorkItem, row: RowShard, message: Tensor) -> tuple[Tensor, Tensor]:
        text = item.plan(row).text[self._sequence.index]
        return message[text:].transpose(0, 1), message[:text].transpose(0, 1)

    def _through(
        self, chunk: int, item: WorkItem, row: RowShard, image: Tensor, text: Tensor, cache: KVCache | None
    ) -> tuple[Tensor, Tensor]:
        recorder = None if cache is None else self._recorder(cache, chunk, item, row)
        attention = self._attention.of_call(item.plan(row), self._mask(row), recorder)
        self.kernel = attention.kernel
        share = TokenShare(
            image=image,
            text=text,
            ids=row.ids if item.patch is None else row.ids[self._own(item.patch, row)],
            sigma=row.sigma,
            prompt=row.prompt,
            residuals=self._residuals(row),
        )
        with self._blocks.running(self._model, chunk, attention) as running:
            return self._model.through(chunk, share, running)

    def _mask(self, row: RowShard) -> Tensor | None:
        if row.extras.mask is None:
            return None
        return self._masks.get(
            row.extras.mask, row.plan.whole_order, self._model.compute_dtype, self._model.device
        )

    def _residuals(self, row: RowShard) -> Residuals | None:
        if not row.extras.residuals:
            return None
        # On the host, where the whole residuals are: the device's own tokens would be waited for.
        own = index_of(tuple(row.plan.image_tokens(self._sequence.index)), torch.device("cpu"))
        count = sum(row.plan.whole.image)
        return ResidualShares(row.extras.residuals, own, count, self._model.device, self._model.compute_dtype)

    def _own(self, patch: int, row: RowShard) -> slice:
        """The place of a patch's tokens among this rank's."""
        return slice_of(tuple(p.image[self._sequence.index] for p in row.plan.patches), patch)

    def _recorder(self, cache: KVCache, chunk: int, item: WorkItem, row: RowShard) -> KVRecorder:
        if item.patch is not None:
            return cache.patch(row.number, chunk, row.plan, item.patch, first=item.evaluation == 0)
        return cache.whole(row.number, chunk, row.plan, self._model.device)

    def _hand_on(
        self, chunk: int, item: WorkItem, row: RowShard, outputs: tuple[Tensor, Tensor] | None, leave: Leave
    ) -> None:
        """`outputs`: (image, text), or None where nothing was computed and the message is only due."""
        if self.is_last and chunk == len(self._model.chunks) - 1:
            leave(item, row, self.empty_output(item, row).zero_() if outputs is None else outputs[0].float())
            return
        if outputs is None:
            message = self._message(item, row).zero_()
        else:
            image, text = outputs
            message = torch.cat([text, image], dim=1).transpose(0, 1)
        if self.is_last:
            self.back.send(message, 0)
        else:
            self.onward.send(message, self._pipe.index + 1)
