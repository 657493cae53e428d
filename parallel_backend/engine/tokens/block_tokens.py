"""The tokens of blocks, cut to one rank's share and gathered again, as described in models/tokens/regions.py.

The share of a joined stream ("txt+img") is the share of each of its streams, one after the other. If these streams have
not been seen separately, the joined stream is cut as one. A rank without a token of a stream (an empty prompt has five)
holds a stand-in, because blocks cannot compute on no tokens. A stand-in enters no exchange and no result.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from ...errors import RequestError
from ...layout import slice_of, split_sizes
from ...models.tokens.regions import Argument, ExpandingTimestep, FirstToken, Ranges, Tokens
from ..comm.collectives import all_gather
from ..comm.groups import Axis


@dataclass(frozen=True)
class ImagePatch:
    """One of `count` patches of an image's tokens; `number` counts from 0."""

    number: int
    count: int


@dataclass
class BlockTokens:
    """The tokens of each stream in one pass through blocks. `axis`: the ranks that share them; `weights`: how much each
    takes, empty for equal shares; `patch`: the ranks share only the tokens of this patch, a run of each stream.

    `counts`: number of tokens by stream, learnt from the first tensors that are cut; `shapes`: sizes of the token dims,
    for streams whose tokens have several dims.
    """

    axis: Axis
    weights: tuple[float, ...]
    patch: ImagePatch | None = None
    counts: dict[str, int] = field(default_factory=dict)
    shapes: dict[str, torch.Size] = field(default_factory=dict)
    # (value, its cut) by (id of value, argument). The value is kept, so that its id is not used again.
    _cuts: dict[tuple[int, Any], tuple[Any, Any]] = field(default_factory=dict)
    _orders: dict[tuple[str, ...], Tensor] = field(default_factory=dict)

    def total(self, stream: str) -> int:
        return sum(self.counts[name] for name in self._names(stream))

    def lengths(self, stream: str) -> tuple[int, ...]:
        """Returns the number of tokens of `stream` on each rank of the axis."""
        bounds = [self._bounds(self.counts[name]) for name in self._names(stream)]
        each = ([end - begin for begin, end in pairwise(of_name)] for of_name in bounds)
        return tuple(map(sum, zip(*each, strict=True)))

    def held(self, stream: str) -> int:
        """Returns the number of tokens of `stream` that this rank holds, including stand-ins."""
        return sum(piece.stop - piece.start for piece in self._held(stream))

    def pieces(self, stream: str, index: int | None = None) -> list[slice]:
        """Returns the slices of a rank's tokens, by default this rank's, in a whole tensor of `stream`."""
        found, offset = [], 0
        rank = self.axis.index if index is None else index
        for name in self._names(stream):
            bounds = self._bounds(self.counts[name])
            found.append(slice(offset + bounds[rank], offset + bounds[rank + 1]))
            offset += self.counts[name]
        return found

    def local(self, value: Tensor, stream: str, dim: int) -> Tensor:
        """Returns this rank's tensor `value` without stand-ins."""
        sizes = [piece.stop - piece.start for piece in self.pieces(stream)]
        if 0 not in sizes:
            return value
        held = value.split([max(size, 1) for size in sizes], dim)
        return torch.cat([part.narrow(dim, 0, size) for part, size in zip(held, sizes, strict=True)], dim)

    def with_stand_ins(self, value: Tensor, stream: str, dim: int) -> Tensor:
        """Returns this rank's tokens `value` with stand-ins of 0 inserted."""
        sizes = [piece.stop - piece.start for piece in self.pieces(stream)]
        if 0 not in sizes:
            return value
        stand_in = value.new_zeros([1 if n == dim else size for n, size in enumerate(value.shape)])
        parts = value.split(sizes, dim)
        return torch.cat([part if part.shape[dim] else stand_in for part in parts], dim)

    def order(self, stream: str, device: torch.device) -> Tensor:
        """Returns the numbers of all tokens of `stream`, rank by rank, as an exchange brings them."""
        key = tuple(self._names(stream))
        if key not in self._orders:
            pieces = (piece for rank in range(self.axis.size) for piece in self.pieces(stream, rank))
            numbers = [torch.arange(piece.start, piece.stop, device=device) for piece in pieces]
            self._orders[key] = torch.cat(numbers)
        return self._orders[key]

    def cut(self, value: Any, argument: Argument, carried: bool = False) -> Any:
        """Returns this rank's share of a block's argument. `carried`: a previous block may have given a share."""
        carried = carried or (isinstance(argument, Tokens) and argument.passed)
        if value is None or (carried and self._is_share(value, argument)):
            return value
        if carried:  # it differs for each block, so it is not cached
            return self._cut(value, argument, carried)
        key = (id(value), argument)
        if key not in self._cuts:
            self._cuts[key] = (value, self._cut(value, argument, carried))
        return self._cuts[key][1]

    def share_of(self, share: Any, argument: Tokens, rank: int, common: Mapping[str, int]) -> Any:
        """Returns `share`, this rank's share of an argument, with its first tokens replaced by those of `rank`.
        `common`: how many tokens of each stream to replace; streams that it does not name stay unchanged."""
        key = (id(share), (argument, rank, *common.items()))
        if key not in self._cuts:
            whole = next(value for value, cut in self._cuts.values() if cut is share)
            stream = argument.stream
            theirs, mine = self.pieces(stream, rank), self._held(stream)
            by_name = [(stream, theirs, mine)]
            if stream not in common:
                each = zip(self._names(stream), theirs, mine, strict=True)
                by_name = [(name, [others], [local]) for name, others, local in each]
            pieces: list[slice] = []
            for name, others, local in by_name:
                count = common.get(name, 0)
                pieces += [*_numbers(others, 0, count), *_numbers(local, count, None)]
            items = [whole] if isinstance(whole, Tensor) else whole
            parts = [self._share(item, argument, pieces) for item in items]
            self._cuts[key] = (share, parts[0] if isinstance(whole, Tensor) else type(whole)(parts))
        return self._cuts[key][1]

    def gather(self, value: Tensor, argument: Tokens) -> Tensor:
        """Returns the whole tensor from the ranks' shares, with 0 for tokens of other patches. Collective."""
        stream, dim = argument.stream, argument.dim % value.ndim
        several = stream in self.shapes and value.ndim > dim + argument.over
        if several:
            value = value.flatten(dim, dim + argument.over - 1)
        if value.shape[dim] != self.held(stream):
            raise RequestError(
                f"A block gave {value.shape[dim]} tokens of {stream} where {self.held(stream)} belong to this "
                f"device, so this version of ComfyUI computes it another way. Set ulysses_degree and ring_degree to 1."
            )
        if self.axis.size > 1 or self.patch is not None:
            shares = self.local(value, stream, dim).movedim(dim, 0)
            if self.axis.size > 1:
                shares = all_gather(shares, self.lengths(stream), self.axis)
            value = self._in_order(shares, stream).movedim(0, dim).contiguous()
        return value.unflatten(dim, self.shapes[stream]) if several else value

    def cut_residuals(self, control: dict[str, Any], stream: str) -> None:
        """Cuts a ControlNet's residuals in place, in their lists: [B, n, C] for the first n tokens of `stream`."""
        (local,) = self.pieces(stream)
        for residuals in control.values():
            residuals[:] = [None if tensor is None else tensor[:, local] for tensor in residuals]

    def _names(self, stream: str) -> list[str]:
        names = stream.split("+")
        return names if all(name in self.counts for name in names) else [stream]

    def _held(self, stream: str) -> list[slice]:
        """Returns `pieces` of this rank, with the stream's first token as a stand-in for no tokens."""
        found, offset = [], 0
        for name, piece in zip(self._names(stream), self.pieces(stream), strict=True):
            found.append(piece if piece.start < piece.stop else slice(offset, offset + 1))
            offset += self.counts[name]
        return found

    def _bounds(self, total: int) -> tuple[int, ...]:
        """Returns the number of each rank's first token of a stream, and the end of the last rank's tokens."""
        run = slice(0, total)
        if self.patch is not None:
            run = slice_of(split_sizes(total, self.patch.count), self.patch.number)
        sizes = split_sizes(run.stop - run.start, self.axis.size, self.weights)
        return tuple(accumulate(sizes, initial=run.start))

    def _is_share(self, value: Any, argument: Argument) -> bool:
        if not isinstance(value, Tensor) or not isinstance(argument, Tokens):
            return False
        if self._names(argument.stream)[0] not in self.counts:
            return False
        dim = argument.dim % value.ndim
        size = value.shape[dim : dim + argument.over].numel()
        return size == self.held(argument.stream) and size != self.total(argument.stream)

    def _cut(self, value: Any, argument: Argument, carried: bool) -> Any:
        match argument:
            case Ranges(stream):
                return self._ranges(value, stream)
            case FirstToken(stream):
                (local,) = self.pieces(stream)
                return min(max(value - local.start, 0), local.stop - local.start)
            case ExpandingTimestep(stream):
                if isinstance(value, Tensor):
                    return self._share(value, Tokens(stream, grouped=True))
                return type(value)(self._share(value.expand(), Tokens(stream)), None)
            case Tokens():
                return self._tokens(value, argument, carried)

    def _tokens(self, value: Any, argument: Tokens, carried: bool) -> Any:
        if isinstance(value, Tensor):
            return self._share(value, argument)
        return type(value)(
            self._share(item, argument)
            if isinstance(item, Tensor)
            and argument.item in (None, i)
            and not (carried and self._is_share(item, argument))
            else item
            for i, item in enumerate(value)
        )

    def _ranges(self, ranges: Iterable[tuple[Any, ...]], stream: str) -> list[tuple[Any, ...]]:
        """Cuts (first, end, …) ranges to this rank's tokens, in the numbers of its share."""
        found, offset = [], 0
        for local in self.pieces(stream):
            for begin, end, *rest in ranges:
                end = self.total(stream) if end is None else end
                begin, end = max(begin, local.start), min(end, local.stop)
                if begin < end:
                    found.append((begin - local.start + offset, end - local.start + offset, *rest))
            offset += max(local.stop - local.start, 1)
        return found

    def _share(self, value: Tensor, argument: Tokens, pieces: list[slice] | None = None) -> Tensor:
        if argument.ndim not in (None, value.ndim):
            return value
        stream, dim = argument.stream, argument.dim % value.ndim
        given, several = value, argument.over > 1 and value.ndim > dim + argument.over
        if several:
            self.shapes.setdefault(stream, value.shape[dim : dim + argument.over])
            value = value.flatten(dim, dim + argument.over - 1)
        if self._names(stream)[0] not in self.counts and not argument.grouped:
            self.counts[stream] = value.shape[dim]
        total = self.total(stream)
        if value.shape[dim] != total and not argument.grouped and not several:
            # Versions of ComfyUI differ in the dim in which rotary embeddings have their tokens.
            dim = next((d for d in range(1, value.ndim) if value.shape[d] == total), dim)
        size = value.shape[dim]
        if size == 1 and total > 1:  # the same for all tokens
            return value
        if size == total:
            if self.axis.size == 1 and self.patch is None:
                return given
            out = torch.cat(
                [value[(slice(None),) * dim + (piece,)] for piece in pieces or self._held(stream)], dim
            )
            return out.unflatten(dim, (out.shape[dim], *[1] * (argument.over - 1))) if several else out
        if not argument.grouped or size > total:
            raise RequestError(
                f"A block takes {size} tokens where {stream} has {total}, so its tokens cannot be shared out. Set "
                f"ulysses_degree and ring_degree to 1."
            )
        (held,) = self._held(stream)
        places = torch.arange(held.start, held.stop, device=value.device) // -(-total // size)
        return value.index_select(dim, places)

    def _in_order(self, shares: Tensor, stream: str) -> Tensor:
        """Returns [S, …] with tokens in the order of a whole tensor. `shares`: those of all ranks, concatenated."""
        names = self._names(stream)
        if len(names) == 1 and self.patch is None:
            return shares
        whole, begin = shares.new_zeros(self.total(stream), *shares.shape[1:]), 0
        for rank in range(self.axis.size):
            for piece in self.pieces(stream, rank):
                size = piece.stop - piece.start
                whole[piece] = shares[begin : begin + size]
                begin += size
        return whole


def _numbers(pieces: list[slice], begin: int, end: int | None) -> Iterator[slice]:
    """Yields slices of the tokens [begin, end), counted over all pieces; `end` None for all the rest."""
    for piece in pieces:
        size = piece.stop - piece.start
        first, last = min(begin, size), size if end is None else min(end, size)
        if first < last:
            yield slice(piece.start + first, piece.start + last)
        begin, end = begin - first, None if end is None else end - last


@dataclass
class LastTokens(BlockTokens):
    """The tokens of a stream that is the last part of a longer stream. Ranks share out the longer one; each holds those
    tokens of this stream that are in its share. `among`: the number of tokens of the longer stream."""

    among: int = 0

    def _bounds(self, total: int) -> tuple[int, ...]:
        return tuple(max(bound - (self.among - total), 0) for bound in super()._bounds(self.among))
