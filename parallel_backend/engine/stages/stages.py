"""The stages of a ComfyUI module under PipeFusion: each rank runs the module's forward with its stage's blocks only.

Blocks of other stages pass on their inputs. The stage's first block takes the tokens that the previous stage sent.
After its last block the tokens go to the next stage. So a stage computes its blocks and, like every stage, the code
around the blocks. Only the first stage computes other lists of blocks before these (refiners): no other needs them.

The ranks of a stage share out the tokens of an image or patch, if tokens stay apart between blocks. Each rank sends its
share to the rank with the same index in the next stage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from ...errors import RequestError
from ...layout import stage_blocks
from ...models.base import ModuleModel
from ...models.tokens.regions import LAST_BLOCK
from ...requests import STAY, ModuleCall
from ..blocks.block_calls import BlockCalls
from ..comm.collectives import broadcast
from ..comm.groups import ALONE, Axis, Layout
from ..tokens.block_tokens import BlockTokens, ImagePatch, LastTokens
from ..tokens.region_blocks import BlockInputs, blocks_of, tokens_of
from .owners import pack, unpack
from .p2p import P2PChannel
from .stale_keys import BlockKeys, StaleKeyCache

_MARKS = 4  # tries; a low-precision layer hides a change in all of them for one element in ten billion


class _Left(Exception):
    """The signal that a patch has been sent on: another stage computes the rest of the module."""


class ModuleStages:
    """This rank's stage of `model`. `calls`: calls of its blocks over the ranks of the stage; `calls_alone`: on this
    rank only. Raises RequestError if this version of the module has other blocks than its table says."""

    def __init__(
        self,
        model: ModuleModel,
        layout: Layout,
        calls: BlockCalls,
        calls_alone: BlockCalls,
    ) -> None:
        self._model = model
        self._calls, self._calls_alone = calls, calls_alone
        self._sequence, self._shares = layout.sequence, layout.sequence_shares
        self._region = model.regions[-1]
        self._blocks = blocks_of(model.module, self._region)
        self._refiners = [blocks_of(model.module, region) for region in model.regions[:-1]]
        self._pipe, self._return_group = layout.pipe, layout.return_group
        # The place of the image's tokens in what leaves the blocks.
        last = self._region.leave == LAST_BLOCK
        self._leaves = self._blocks[-1].image[1] if last else tokens_of(self._region.leaves)
        self._local_blocks = stage_blocks(len(self._blocks), layout.stage_shares)[layout.pipe.index]
        self._onward = P2PChannel(layout.pipe)
        self._back = P2PChannel(layout.return_group)
        self.tokens = 0  # number of an image's tokens in the last call of whole images
        self._like: Any = None  # the answer to that call without rows, in the module's own form
        # True if the ranks of this stage shared out the tokens of the last call.
        self.shares_tokens = True

    @property
    def count(self) -> int:
        return self._pipe.size

    @property
    def is_first(self) -> bool:
        return self._pipe.index == 0

    def empty_answer(self, rows: int, *sizes: int) -> Tensor:
        """Returns zeros [rows, *sizes]; without `sizes` in the shape of the packed answer to whole images."""
        packed = pack(self._like)
        assert packed is not None, "whole images went before"
        return packed.new_zeros(rows, *(sizes or packed.shape[1:]))

    def in_form(self, packed: Tensor) -> Any:
        """Turns a packed answer into the form in which the module itself gives it."""
        return unpack(packed, self._like)

    def full_call(self, call: ModuleCall, keys: StaleKeyCache | None) -> Any:
        """Computes a call of whole images, with the answer on every stage. `keys`: stores their keys and values."""
        with self._running(call, None, keys):
            answer = self._model.module(*call.args, **call.kwargs)
        packed = pack(answer)
        if packed is None:
            raise RequestError(
                f"{type(self._model.module).__name__} answers with more than tensors, which PipeFusion's stages do not "
                f"know; set pipefusion_degree to 1."
            )
        self._onward.settle()
        packed = broadcast(packed.contiguous(), self.count - 1, self._return_group)
        answer = unpack(packed, answer)
        # No views, which would keep the answer's memory.
        self._like = tree_map(lambda one: one.new_empty(0, *one.shape[1:]), answer)
        return answer

    def flow_blocked_by(self, call: ModuleCall, keys: StaleKeyCache) -> str:
        """Returns why calls like this one cannot go through the stages in patches, worded for users; empty if they can.
        `call`: a call of whole images; `keys`: the keys that it left."""
        if keys.masked:
            return "attention has a mask here, which patches do not know"
        if call.kwargs.get("control") is not None:
            return "a ControlNet adds to whole images between blocks"
        return (
            "" if call.tokens == STAY else "with these inputs, the model looks at tokens between its blocks"
        )

    def patch(self, call: ModuleCall, patch: ImagePatch, keys: StaleKeyCache) -> Tensor | None:
        """Takes one patch through this stage. The last stage returns the packed answer, in which only the patch's own
        elements are valid; the others return None."""
        try:
            with self._running(call, patch, keys):
                return pack(self._model.module(*call.args, **call.kwargs))
        except _Left:
            return None

    def send_back(self, answer: Tensor) -> None:
        """Sends an answer from the last stage to the first."""
        self._back.send(answer, 0)

    def expect_back(self, empty: Tensor) -> Callable[[], Tensor]:
        """Starts to receive on the first stage what the last one sends back next, into `empty`; returns a function that
        waits for it."""
        return self._back.receive(empty, self.count - 1)

    def end_round(self) -> None:
        self._onward.end_round()
        self._back.end_round()

    def settle(self) -> None:
        """Waits until everything that was sent has left."""
        self._onward.settle()
        self._back.settle()

    def owners(self, call: ModuleCall, patches: int, keys: StaleKeyCache) -> Tensor:
        """Returns for each element of a row of the answer the patch that alone determines it, [elements] int64; -1 if
        there is no such patch. Runs the module without its blocks: an element belongs to the patch whose tokens change
        it. In answers after the first, elements that no patch changes (audio, whose tokens are whole in each patch)
        belong to the last patch, which has the newest keys. No other rank takes part."""
        plain = self._marked(call, None, 0, keys)
        found = torch.zeros(patches, plain.numel(), dtype=torch.bool, device=plain.device)
        for mark in range(1, _MARKS + 1):
            for n in range(patches):
                found[n] |= (self._marked(call, ImagePatch(n, patches), mark, keys) != plain).flatten()
            if bool(found.any(0).all()):
                break
        owner, owners = found.int().argmax(0), found.sum(0)
        first: Tensor = self._like if isinstance(self._like, Tensor) else self._like[0]  # of several answers
        behind = torch.arange(len(owner), device=owner.device) >= first.shape[1:].numel()
        owner[behind & (owners == 0)] = patches - 1
        return owner.where((owners == 1) | (behind & (owners == 0)), -torch.ones_like(owner))

    def _marked(self, call: ModuleCall, patch: ImagePatch | None, mark: int, keys: StaleKeyCache) -> Tensor:
        """Returns a row of the answer if all tokens leave the blocks with one value, those of `patch` with another."""
        cut = None if patch is None else self._tokens_of(patch, ALONE, keys.among)

        def marked(tokens: Tensor) -> Tensor:
            plain = torch.empty_like(tokens)
            plain[:] = _values(0, tokens)
            if cut is None:
                return plain
            local = cut.gather(torch.ones_like(cut.cut(tokens, self._leaves)), self._leaves)
            return torch.where(local > 0, _values(mark, tokens), plain)

        def first(inputs: BlockInputs) -> Any:
            if cut is not None:
                inputs.cut(cut)  # `cut` learns the number of tokens of each stream
            return inputs.handed_on()

        with ExitStack() as restore:
            self._blocks[0].answer_by(first, restore)
            for block in chain(*self._refiners, self._blocks[1:]):
                block.answer_by(BlockInputs.handed_on, restore)
            restore.callback(self._on_leaving(marked))
            answer = pack(self._model.module(*call.args, **call.kwargs))
        assert answer is not None, "whole images went before"
        return answer[0]

    def _on_leaving(self, change: Callable[[Tensor], Tensor]) -> Callable[[], None]:
        """Replaces the tokens that leave the blocks by `change(tokens)`; returns a function that ends this."""
        if self._region.leave != LAST_BLOCK:
            leave = self._model.module.get_submodule(str(self._region.leave))
            return leave.register_forward_pre_hook(lambda _, args: (change(args[0]), *args[1:])).remove
        last = self._blocks[-1]
        gives = [None if name is None else last.kind.arguments.get(name) for name in last.kind.gives]
        place = gives.index(self._leaves)

        def given(module: nn.Module, args: tuple[Any, ...], out: Any) -> Any:
            if not isinstance(out, tuple):
                return change(out)
            return (*out[:place], change(out[place]), *out[place + 1 :])

        return last.module.register_forward_hook(given).remove

    def _tokens_of(self, patch: ImagePatch | None, axis: Axis, among: int) -> BlockTokens:
        """Returns the tokens of a patch, or of whole images, over the ranks of `axis`. If text comes before the image
        in its stream, patches are those of the longest prompt's stream: so every image is cut at the same places.
        `among`: the number of tokens of that stream, 0 if patches are those of the image's own."""
        weights = self._shares if axis.size > 1 else ()
        if patch is not None and among:
            return LastTokens(axis, weights, patch, among=among)
        return BlockTokens(axis, weights, patch)

    @contextmanager
    def _running(
        self, call: ModuleCall, patch: ImagePatch | None, keys: StaleKeyCache | None
    ) -> Iterator[None]:
        """Makes calls of the module compute this stage's blocks inside the context."""
        stay = call.tokens == STAY and call.kwargs.get("control") is None
        self.shares_tokens = stay
        cuts = stay and (keys is not None or self._sequence.size > 1)
        among = 0 if keys is None else keys.among
        tokens = self._tokens_of(patch, self._sequence, among) if cuts else None

        def leave(left: Tensor) -> Tensor:
            if tokens is not None:
                left = tokens.gather(left, self._leaves)
            if patch is None:
                self.tokens = left.shape[self._leaves.dim :][: self._leaves.over].numel()
            return left

        with ExitStack() as restore:
            for number, block in enumerate(self._blocks):
                block.answer_by(partial(self._answer, number, call, tokens, keys), restore)
            last = None
            if self.is_first and stay and keys is not None:
                # A refiner's tokens are the last ones of the image's stream, which the self-test verifies.
                among = 0 if patch is None else among or keys.counts[call.prompts]
                last = self._tokens_of(patch, ALONE, among)
            for region, blocks in enumerate(self._refiners):
                for number, block in enumerate(blocks):
                    block.answer_by(partial(self._refine, (region, number), call, last, keys), restore)
            restore.callback(self._on_leaving(leave))
            yield

    def _answer(
        self,
        number: int,
        call: ModuleCall,
        tokens: BlockTokens | None,
        keys: StaleKeyCache | None,
        inputs: BlockInputs,
    ) -> Any:
        """Answers a call of block `number`."""
        is_whole = tokens is None or tokens.patch is None
        if number == 0 and is_whole and keys is not None:  # on every stage
            keys.counts[call.prompts] = inputs.image_tokens()
        if tokens is not None:
            inputs = inputs.cut(tokens)
        if number == self._local_blocks.stop:
            leaving = inputs.carried()
            for tensor in leaving:
                self._onward.send(tensor, self._pipe.index + 1)
            if not is_whole:
                raise _Left
            # Code between blocks may write into tokens (a ControlNet's residuals), and these are still being sent.
            inputs = inputs.with_carried([tensor.clone() for tensor in leaving])
        if number not in self._local_blocks:
            return inputs.handed_on()
        if number == self._local_blocks.start and not self.is_first:
            inputs = inputs.with_carried(self._received(inputs.carried()))
        if tokens is None:
            return self._calls.run_unshared(inputs)
        return self._calls.run(tokens, inputs, BlockKeys(keys, (call.prompts, number), tokens))

    def _refine(
        self,
        place: tuple[int, int],
        call: ModuleCall,
        tokens: BlockTokens | None,
        keys: StaleKeyCache | None,
        inputs: BlockInputs,
    ) -> Any:
        """Answers a call of a block in a list before the stages' blocks, which each rank of the first stage computes.
        `place`: (number of its region, its number there). Only the first region computes patches; the others (for
        references) are small and computed whole."""
        region, number = place
        if not self.is_first:
            return inputs.handed_on()
        if region > 0 or tokens is None or keys is None:
            return self._calls_alone.run_unshared(inputs)
        stale = BlockKeys(keys, (call.prompts, "refiner", number), tokens)
        out = self._calls_alone.run(tokens, inputs.cut(tokens), stale)
        return tokens.gather(out, inputs.block.image[1]) if inputs.block.is_last else out

    def _received(self, like: Sequence[Tensor]) -> list[Tensor]:
        """Receives what the previous stage sent, in new tensors like these."""
        empty = [torch.empty(one.shape, dtype=one.dtype, device=one.device) for one in like]
        coming = [self._onward.receive(one, self._pipe.index - 1) for one in empty]
        return [arrive() for arrive in coming]


def _values(mark: int, like: Tensor) -> Tensor:
    """Returns random values [width], different for each mark."""
    generator = torch.Generator().manual_seed(mark)
    return torch.randn(like.shape[-1], generator=generator).to(like)
