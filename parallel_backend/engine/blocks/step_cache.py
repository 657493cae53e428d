"""First Block Cache over all ranks: blocks after the first may be left out of a call of a module.

First Block Cache (chengzeyi, ParaAttention, 2024; diffusers/hooks/first_block_cache.py), a simple form of TeaCache (Liu
et al. 2024): where what the first block added differs from what it added in the last call that was computed by less
than a threshold of it (mean absolute values over a row's tokens), the other blocks are taken to add what they added
then. The row that differs most decides for all. diffusers' hooks decide on each rank by its own tokens, so ranks would
go different ways; here ranks add up what they saw, in the same order, and all decide alike.

A module's forward is not cut in two: it runs, and blocks that are left out hand on what they get. What the region's end
then takes is replaced, so it does not matter what the module does between its blocks, such as adding residuals.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ...models.tokens.cached_outputs import CachedOutput
from ..comm.collectives import all_gather
from ..comm.groups import Layout
from ..comm.traffic_counter import Traffic
from ..tokens.block_tokens import BlockTokens
from ..tokens.region_blocks import Block

# Of calls that are compared: whose prompts they are of, and the strategy.
Key = tuple[tuple[int, ...], Hashable]


@dataclass(frozen=True)
class CachedResidual:
    """Of an output, in the last call that was computed: what the first block changed, and what the others added."""

    change: Tensor
    added: Tensor


class ModuleCache:
    """What one sampling job keeps from one network call to the next, of each of its prompts; it ends with the job.

    Rows of one network call decide together; prompts that ComfyUI puts into calls of their
    own (of other lengths) decide each for itself, under every strategy alike.
    """

    def __init__(self, threshold: float) -> None:
        self.threshold = threshold
        self._residuals: dict[Key, list[CachedResidual]] = {}
        self.calls = 0
        self.reused = 0

    @contextmanager
    def call(self, key: Key, outputs: Sequence[CachedOutput], vote: ReuseVote) -> Iterator[CachedCall]:
        """Around a network call. A call that fails leaves nothing."""
        one = CachedCall(self.threshold, outputs, self._residuals.pop(key, None), vote)
        yield one
        self.calls += 1
        self.reused += one.reuses
        if (residuals := one.residuals()) is not None:
            self._residuals[key] = residuals


@dataclass(frozen=True)
class ReuseVote:
    """Where ranks decide. `shared`: a row's tokens are shared out over the sequence axis while blocks run; `on_reuse`:
    what all ranks do once they have decided to leave blocks out."""

    layout: Layout
    traffic: Traffic
    shared: bool
    on_reuse: Callable[[], None]

    def largest(self, change: Tensor, before: Tensor) -> float:
        """The largest change / before of any row on any rank, NaN where it is that on one. Sums of tokens [rows,
        outputs] float64. The same on all ranks, which gather before they add (decision 025). Collective."""
        sums = torch.stack([change, before])
        if self.shared:
            axis = self.layout.sequence
            of_ranks = all_gather(sums.flatten(), (sums.numel(),) * axis.size, axis, self.traffic)
            sums = of_ranks.view(axis.size, *sums.shape).sum(0)
        mine = (sums[0] / sums[1]).max().view(1)
        everyone = self.layout.everyone
        return all_gather(mine, (1,) * everyone.size, everyone, self.traffic).max().item()


class CachedCall:
    """One network call on one rank. `reuses`: blocks after the first are left out."""

    def __init__(
        self,
        threshold: float,
        outputs: Sequence[CachedOutput],
        before: list[CachedResidual] | None,
        vote: ReuseVote,
    ) -> None:
        self._threshold = threshold
        self._outputs = outputs
        self._before = before
        self._vote = vote
        self._first_gave: list[Tensor] = []  # what the first block gave
        self._changes: list[Tensor] = []
        self._added: dict[int, Tensor] = {}  # by output
        self.reuses = False

    def run(
        self,
        block: Block,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        compute: Callable[[], Any],
        tokens: BlockTokens | None = None,
    ) -> Any:
        """What a call of the block gives; computed, or what it gets. `tokens`: of which the arguments are shares."""
        if block.is_first:
            taken = self._copied(block.handed_on(args, kwargs))  # blocks may change what they get
            out = compute()
            self._first_gave = self._copied(out)
            self._changes = [after - before for after, before in zip(self._first_gave, taken, strict=True)]
            self._decide(tokens)
            return out
        out = block.handed_on(args, kwargs) if self.reuses else compute()
        if block.is_last and any(output.at_end for output in self._outputs):
            return self._ended(out)
        return out

    def take_leave(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Hook before the module that follows the blocks, first of all hooks."""
        (number,) = (n for n, output in enumerate(self._outputs) if not output.at_end)
        return (self._at_end(number, args[0]), *args[1:])

    def residuals(self) -> list[CachedResidual] | None:
        """For the next call with these prompts; None where the module did not come to all that there is to keep."""
        if self.reuses:
            return self._before
        if len(self._added) < len(self._outputs):
            return None
        return [CachedResidual(change, self._added[number]) for number, change in enumerate(self._changes)]

    def _decide(self, tokens: BlockTokens | None) -> None:
        rows = [_sums(change, output, tokens) for change, output in self._deciding(self._changes)]
        change = torch.stack(rows, 1)
        before, difference = torch.full_like(change, torch.nan), change
        known = self._before
        if known is not None and all(
            one.change.shape == now.shape for one, now in zip(known, self._changes, strict=True)
        ):
            before = torch.stack(
                [_sums(one.change, output, tokens) for one, output in self._deciding(known)], 1
            )
            moved = [now - one.change for one, now in zip(known, self._changes, strict=True)]
            difference = torch.stack([_sums(one, output, tokens) for one, output in self._deciding(moved)], 1)
        # NaN, where there is nothing to compare with, is not below.
        self.reuses = self._vote.largest(difference, before) < self._threshold
        if self.reuses:
            self._vote.on_reuse()
        else:
            self._before = None  # its memory is for what comes now

    def _deciding(self, of_outputs: Sequence[Any]) -> Iterator[tuple[Any, CachedOutput]]:
        pairs = zip(of_outputs, self._outputs, strict=True)
        return ((one, output) for one, output in pairs if output.decides)

    def _copied(self, out: Any) -> list[Tensor]:
        found = _several(out)
        return [found[output.index].clone() for output in self._outputs]

    def _ended(self, out: Any) -> Any:
        found = list(_several(out))
        for number, output in enumerate(self._outputs):
            if output.at_end:
                found[output.index] = self._at_end(number, found[output.index])
        return type(out)(found) if isinstance(out, (list, tuple)) else found[0]

    def _at_end(self, number: int, value: Tensor) -> Tensor:
        """An output as the blocks give it, from as they handed it on where they were left out."""
        if not self._first_gave:  # the first block itself was left out, by a node that skips layers
            return value
        given = self._first_gave[number]
        if self.reuses:
            assert self._before is not None, "it was compared with"
            return given + self._before[number].added
        if value.shape == given.shape:
            self._added[number] = value - given
        return value


def _several(out: Any) -> Sequence[Tensor]:
    return out if isinstance(out, (list, tuple)) else (out,)


def _sums(value: Tensor, output: CachedOutput, tokens: BlockTokens | None) -> Tensor:
    """[rows] float64 sums of absolute values, over this rank's tokens where `value` is a share of `tokens`."""
    argument = output.tokens
    if argument is not None and tokens is not None:
        value = tokens.local(value, argument.stream, argument.dim % value.ndim)
    if argument is not None and argument.dim == 0:  # one row, without a dim of its own
        value = value[None]
    of_tokens = value.abs().sum(dim=-1, dtype=torch.float32).flatten(1)
    return of_tokens.sum(dim=1, dtype=torch.float64)
