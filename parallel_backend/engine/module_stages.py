"""The stages of a ComfyUI module under PipeFusion: each rank runs the module's own forward with its own blocks alone.

Blocks of other stages hand on what they get; the first own one takes what the stage before sent, and behind the last
own one tokens are sent on. So a stage computes its blocks, and everything around blocks as every other stage does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import RequestError
from ..layout import stage_blocks
from ..models.base import ModuleModel
from ..requests import ModuleCall
from .block_calls import as_it_is, cut_arguments
from .block_tokens import BlockTokens
from .collectives import broadcast
from .groups import Axis, Layout
from .kept_keys import KeptKeys
from .pipefusion.p2p import P2PChannel, PendingRecv
from .region_blocks import Block, blocks_of, tokens_of
from .traffic_counter import Traffic

_MARKS = 4  # at which a layer of low precision gives twice the same by chance once in ten billion elements


class _Left(Exception):
    """A patch has been sent on; what the module still would compute is another stage's."""


@dataclass(frozen=True)
class Patch:
    """Number `number` of `count` patches of an image's tokens."""

    number: int
    count: int


class ModuleStages:
    """This rank's stage of `model`. Raises RequestError where this version of the module has other blocks than its
    table says."""

    def __init__(self, model: ModuleModel, layout: Layout, traffic: Traffic) -> None:
        self._model = model
        self._region = model.regions[-1]
        self._blocks = blocks_of(model.module, self._region)
        self._pipe, self._return_group = layout.pipe, layout.return_group
        self._own = stage_blocks(len(self._blocks), layout.stage_shares)[layout.pipe.index]
        self._traffic = traffic
        self._onward = P2PChannel(layout.pipe, traffic)
        self._back = P2PChannel(layout.return_group, traffic)
        self.tokens = 0  # of an image in the last whole call
        self._like: Tensor | None = None  # the answer to that

    @property
    def count(self) -> int:
        return self._pipe.size

    @property
    def is_first(self) -> bool:
        return self._pipe.index == 0

    @property
    def is_last(self) -> bool:
        return self._pipe.index == self.count - 1

    def empty_answer(self, rows: int, *sizes: int) -> Tensor:
        """Like the module's answers to whole images, as far as `sizes` do not say otherwise."""
        assert self._like is not None, "whole images went before"
        return self._like.new_zeros(rows, *(sizes or self._like.shape[1:]))

    def whole(self, call: ModuleCall, keys: KeptKeys | None) -> Tensor:
        """The answer to a call of whole images, on every stage. `keys`: where their keys and values are left."""
        with self._running(call, None, keys):
            answer = self._model.module(*call.args, **call.kwargs)
        if not isinstance(answer, Tensor):
            raise RequestError(
                f"{type(self._model.module).__name__} answers with more than one tensor, which PipeFusion's stages do "
                f"not know; set pipefusion_degree to 1."
            )
        self._onward.settle()
        answer = broadcast(answer.contiguous(), self.count - 1, self._return_group, self._traffic)
        self._like = answer.new_empty(0, *answer.shape[1:])  # and not a view, which would keep it
        return answer

    def patch(self, call: ModuleCall, patch: Patch, keys: KeptKeys) -> Tensor | None:
        """Takes one patch through this stage. On the last one the answer, in which only the elements of that patch
        mean anything."""
        try:
            with self._running(call, patch, keys):
                return self._model.module(*call.args, **call.kwargs)
        except _Left:
            return None

    def send_back(self, answer: Tensor) -> None:
        """From the last stage to the first."""
        self._back.send(answer, 0)

    def expect_back(self, empty: Tensor) -> PendingRecv:
        """What the last stage sends back next, on the first."""
        return self._back.receive(empty, self.count - 1)

    def end_round(self) -> None:
        self._onward.end_round()
        self._back.end_round()

    def settle(self) -> None:
        """Waits until everything that was sent has left."""
        self._onward.settle()
        self._back.settle()

    def owners(self, call: ModuleCall, patches: int) -> Tensor:
        """Of each element of a row of the answer, the number of the patch whose tokens alone make it; -1 where there is
        no such patch. [elements] int64. Asks the module itself: which of them change if the tokens of a patch do that
        leave the blocks? Computes no block; no other rank takes part."""
        plain, found = self._marked(call, None, 0), None
        for mark in range(1, _MARKS + 1):
            changed = [
                (self._marked(call, Patch(n, patches), mark) != plain).flatten() for n in range(patches)
            ]
            together = torch.stack(changed)
            found = together if found is None else found | together
            if bool(found.any(0).all()):
                break
        assert found is not None, "there is a mark"
        owner = found.int().argmax(0)
        return owner.where(found.sum(0) == 1, -torch.ones_like(owner))

    def _marked(self, call: ModuleCall, patch: Patch | None, mark: int) -> Tensor:
        """One row of the answer if all tokens left the blocks alike, and those of a patch with another value."""

        def leave(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            tokens, dim = args[0].clone(), tokens_of(self._region.leaves).dim
            tokens[:] = _values(0, tokens)
            if patch is not None:
                whole = self._cut_into(patch)
                whole.counts[tokens_of(self._region.leaves).stream] = tokens.shape[dim]
                (own,) = whole.pieces(tokens_of(self._region.leaves).stream)
                tokens.narrow(dim, own.start, own.stop - own.start)[:] = _values(mark, tokens)
            return (tokens, *args[1:])

        with ExitStack() as restore:
            for block in self._blocks:
                block.module.forward = lambda *args, _block=block, **kwargs: _block.handed_on(args, kwargs)
                restore.callback(block.module.__dict__.pop, "forward")
            restore.callback(self._leave_module.register_forward_pre_hook(leave).remove)
            answer: Tensor = self._model.module(*call.args, **call.kwargs)
        return answer[0]

    @property
    def _leave_module(self) -> nn.Module:
        return self._model.module.get_submodule(str(self._region.leave))

    def _cut_into(self, patch: Patch) -> BlockTokens:
        """Patches are to tokens what ranks are that share them: a run of each stream."""
        axis = Axis(tuple(range(patch.count)), patch.number, None)
        return BlockTokens(axis, (), self._traffic)

    @contextmanager
    def _running(self, call: ModuleCall, patch: Patch | None, keys: KeptKeys | None) -> Iterator[None]:
        """Inside, a call of the module computes this stage's blocks."""
        tokens = None if patch is None else self._cut_into(patch)

        def leave(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            argument = tokens_of(self._region.leaves)
            if tokens is None:
                self.tokens = args[0].shape[argument.dim]
                return args
            if not self.is_last:
                raise _Left
            (own,) = tokens.pieces(argument.stream)
            sizes = list(args[0].shape)
            sizes[argument.dim] = tokens.total(argument.stream)
            whole = args[0].new_zeros(sizes)
            whole.narrow(argument.dim, own.start, own.stop - own.start).copy_(args[0])
            return (whole, *args[1:])

        with ExitStack() as restore:
            for number, block in enumerate(self._blocks):
                block.module.forward = self._forward_of(number, block, call, tokens, keys)
                restore.callback(block.module.__dict__.pop, "forward")
            restore.callback(self._leave_module.register_forward_pre_hook(leave).remove)
            yield

    def _forward_of(
        self, number: int, block: Block, call: ModuleCall, tokens: BlockTokens | None, keys: KeptKeys | None
    ) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            if tokens is not None:
                args, kwargs = cut_arguments(block, tokens, args, kwargs)
            if number == self._own.stop:
                for tensor in block.carried(args, kwargs):
                    self._onward.send(tensor, self._pipe.index + 1)
                if tokens is not None:
                    raise _Left
            if number not in self._own:
                return block.handed_on(args, kwargs)
            if number == self._own.start and not self.is_first:
                args, kwargs = block.with_carried(self._received(block.carried(args, kwargs)), args, kwargs)
            attention = None if keys is None else keys.attention((call.prompts, number), block.kind, tokens)
            with nullcontext() if attention is None else self._model.attention_by(attention):
                return as_it_is(block.module, args, kwargs)

        return forward

    def _received(self, like: Sequence[Tensor]) -> list[Tensor]:
        """What the stage before sent, in tensors of these forms."""
        empty = [torch.empty(one.shape, dtype=one.dtype, device=one.device) for one in like]
        coming = [self._onward.receive(one, self._pipe.index - 1) for one in empty]
        return [one.taken() for one in coming]


def _values(mark: int, like: Tensor) -> Tensor:
    """[width] of some values, other ones for each mark."""
    generator = torch.Generator().manual_seed(mark)
    return torch.randn(like.shape[-1], generator=generator).to(like)
