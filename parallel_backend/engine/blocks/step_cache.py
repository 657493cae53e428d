"""First Block Cache over all ranks: a call of a module may skip the blocks after the first.

First Block Cache (chengzeyi, ParaAttention, 2024; diffusers/hooks/first_block_cache.py) is a simple form of TeaCache
(Liu et al. 2024). It compares what the first block adds with what it added in the last call that was computed in full.
If the relative difference (mean absolute values over a row's tokens) is below a threshold, the other blocks are skipped
and what they added in that call is added again. The row that differs most decides for all rows. diffusers' hooks decide
on each rank by its own tokens, so ranks could differ. Here all ranks add up the same sums in the same order.

The module's forward still runs: skipped blocks pass on their inputs. The value that leaves the blocks is replaced, so
it does not matter what the module does between its blocks, such as adding residuals.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ...models.tokens.cached_outputs import CachedOutput
from ..comm.collectives import all_gather
from ..comm.groups import Layout
from ..tokens.block_tokens import BlockTokens
from ..tokens.region_blocks import BlockInputs

# (prompts, strategy): only calls with the same key are compared.
Key = tuple[tuple[int, ...], Hashable]


@dataclass(frozen=True)
class CachedResidual:
    """One output in the last computed call: `change` by the first block, and what the other blocks `added`."""

    change: Tensor
    added: Tensor


class ModuleCache:
    """The step cache of one sampling job: residuals of each prompt, kept from one network call to the next.

    The rows of one network call decide as one. Prompts that ComfyUI puts into separate calls (because their lengths
    differ) decide separately, under every strategy.
    """

    def __init__(self, threshold: float) -> None:
        self.threshold = threshold
        self._residuals: dict[Key, list[CachedResidual]] = {}
        self.calls = 0
        self.reused = 0

    @contextmanager
    def call(self, key: Key, outputs: Sequence[CachedOutput], vote: ReuseVote) -> Iterator[CachedCall]:
        """Wraps a network call and keeps its residuals; a call that fails leaves none."""
        one = CachedCall(self.threshold, outputs, self._residuals.pop(key, None), vote)
        yield one
        self.calls += 1
        self.reused += one.reuses
        if (residuals := one.residuals()) is not None:
            self._residuals[key] = residuals


@dataclass(frozen=True)
class ReuseVote:
    """The vote of all ranks on reuse. `shared`: True if the sequence axis shares out a row's tokens while blocks run;
    `on_reuse`: called on all ranks when they have decided to skip blocks."""

    layout: Layout
    shared: bool
    on_reuse: Callable[[], None]

    def largest(self, change: Tensor, before: Tensor) -> float:
        """Returns the largest change / before of any row on any rank, or NaN if it is NaN on one. `change`, `before`:
        sums over tokens, [rows, outputs] float64. Collective. The result is the same on all ranks, because they gather
        before they add (decision 025)."""
        sums = torch.stack([change, before])
        if self.shared:
            axis = self.layout.sequence
            of_ranks = all_gather(sums.flatten(), (sums.numel(),) * axis.size, axis)
            sums = of_ranks.view(axis.size, *sums.shape).sum(0)
        mine = (sums[0] / sums[1]).max().view(1)
        everyone = self.layout.everyone
        return all_gather(mine, (1,) * everyone.size, everyone).max().item()


@dataclass(eq=False)
class CachedCall:
    """One network call on one rank. `reuses`: True if the blocks after the first are skipped."""

    _threshold: float
    _outputs: Sequence[CachedOutput]
    _before: list[CachedResidual] | None
    _vote: ReuseVote
    _first_gave: list[Tensor] = field(default_factory=list)  # outputs of the first block
    _changes: list[Tensor] = field(default_factory=list)
    _added: dict[int, Tensor] = field(default_factory=dict)  # by output
    reuses: bool = False

    def run(
        self, compute: Callable[[BlockInputs], Any], inputs: BlockInputs, tokens: BlockTokens | None = None
    ) -> Any:
        """Returns a block's outputs; for a skipped block its inputs. `tokens`: set if the inputs are shares."""
        if inputs.block.is_first:
            taken = self._copied(inputs.handed_on())  # blocks may change their inputs
            out = compute(inputs)
            self._first_gave = self._copied(out)
            self._changes = [after - before for after, before in zip(self._first_gave, taken, strict=True)]
            self._decide(tokens)
            return out
        out = inputs.handed_on() if self.reuses else compute(inputs)
        if inputs.block.is_last and any(output.at_end for output in self._outputs):
            return self._ended(out)
        return out

    def take_leave(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Replaces the input of the module after the blocks; the first of its forward pre-hooks."""
        (number,) = (n for n, output in enumerate(self._outputs) if not output.at_end)
        return (self._at_end(number, args[0]), *args[1:])

    def residuals(self) -> list[CachedResidual] | None:
        """Returns what to keep for the next call with these prompts; None if the module did not reach every output."""
        if self.reuses:
            return self._before
        if len(self._added) < len(self._outputs):
            return None
        return [CachedResidual(change, self._added[number]) for number, change in enumerate(self._changes)]

    def _decide(self, tokens: BlockTokens | None) -> None:
        def sums(values: Sequence[Tensor]) -> Tensor:
            pairs = zip(values, self._outputs, strict=True)
            return torch.stack([_sums(value, output, tokens) for value, output in pairs if output.decides], 1)

        changes, before = self._changes, [one.change for one in self._before or ()]
        if [one.shape for one in before] == [one.shape for one in changes]:
            difference = sums([now - one for one, now in zip(before, changes, strict=True)])
            compared_with = sums(before)
        else:  # NaN means that there is nothing to compare with; it is not below the threshold
            difference = sums(changes)
            compared_with = torch.full_like(difference, torch.nan)
        self.reuses = self._vote.largest(difference, compared_with) < self._threshold
        if self.reuses:
            self._vote.on_reuse()
        else:
            self._before = None  # frees its memory for this call's residuals

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
        """Returns the output as the blocks would give it; if they ran, stores what they added."""
        if not self._first_gave:  # a node that skips layers has skipped the first block
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
    """Returns sums of absolute values, [rows] float64. `tokens`: set if `value` is this rank's share."""
    argument = output.tokens
    if argument is not None and tokens is not None:
        value = tokens.local(value, argument.stream, argument.dim % value.ndim)
    if argument is not None and argument.dim == 0:  # one row, without a dim of its own
        value = value[None]
    of_tokens = value.abs().sum(dim=-1, dtype=torch.float32).flatten(1)
    return of_tokens.sum(dim=1, dtype=torch.float64)
