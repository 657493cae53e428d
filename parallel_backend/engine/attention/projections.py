"""Queries, keys and values of a block on two ranks, projected from the tokens of both by the rows of this rank's heads.

Ulysses exchanges what projections give: of each token half of its queries, keys and values, 1.5 times its own width.
Two ranks send less when they exchange the tokens before: their width once, and each then projects all tokens for its
own heads, which is as much arithmetic. With more ranks, or where keys have half as many heads as queries or fewer, it
would be no less.

A block's own code runs in between (norms by head, rotation), so each layer gives what it would have given in shape: in
the first half of the heads' places this rank's heads of a token of the first rank, in the second half those of a token
of the second rank. The tokens that one rank has more than the other stay as they would have been, and are exchanged
after they were projected.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ...models.base import ModuleModel
from ...models.tokens.regions import Blocks, Projection, Projections, Tokens
from ..comm.collectives import all_reduce
from ..comm.groups import Layout
from ..tokens.block_tokens import BlockTokens

RANKS = 2
_ROWS = {"weight", "bias"}  # parameters of a linear layer that have a row for each output


class OtherProjections(Exception):
    """A block takes its queries and keys another way from its layers to its attention than is known."""


class Exchanges(Protocol):
    """The exchanges of one call of attention, as sequence.SequenceAttention makes them."""

    def group_lengths(self, stream: str) -> tuple[int, ...]: ...

    def to_heads(
        self, tensors: tuple[Tensor, ...], heads: tuple[list[slice], ...], lengths: tuple[int, ...]
    ) -> Callable[[], list[Tensor]]: ...

    def exchange(
        self, send: Tensor, send_sizes: tuple[int, ...], receive_sizes: tuple[int, ...], channels: int
    ) -> Callable[[], Tensor]: ...


class PairedProjections:
    """The projections of one call of a block. `common`: of each stream that is exchanged before it is projected, how
    many tokens both ranks have; `rotary`: what rotates this rank's queries and keys, and which argument that is.
    `attention` exchanges."""

    def __init__(
        self,
        block: nn.Module,
        words: Projections,
        common: dict[str, int],
        rotary: tuple[Any, Tokens] | None,
        model: ModuleModel,
        tokens: BlockTokens,
        layout: Layout,
        attention: Exchanges,
    ) -> None:
        self._block, self._words, self._common = block, words, common
        self._model, self._tokens, self._attention = model, tokens, attention
        self._ulysses = layout.ulysses
        self._first = layout.ring.index * RANKS  # of this pair, on the sequence axis
        self._heads = _heads(block, words)
        self._rotary = rotary
        self._rotated = self._inside = False
        self._arrived: tuple[Tensor, Tensor] | None = None  # tokens that were sent, and the other rank's

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Inside, the block's layers project so."""
        with ExitStack() as restore:
            layers = [layer for layer in self._words.layers if layer.stream in self._common]
            ways: dict[str, Callable[..., Tensor]] = dict.fromkeys(self._words.norms, self._norm)
            ways |= {layer.path: partial(self._project, layer) for layer in layers}
            for path, way in ways.items():
                module = self._block.get_submodule(path)
                module.forward = partial(way, module)
                restore.callback(module.__dict__.pop, "forward")
            if self._rotary is not None:
                restore.enter_context(self._model.rotary_by(self._rotate))
            yield

    def arrive(self, tensors: Sequence[Tensor], stream: str) -> list[Tensor]:
        """Each [B, H, s, D], as the block gives it to its attention -> [B, H / 2, S, D]: this rank's heads, with the
        tokens in the order in which an exchange brings them."""
        if self._rotary is not None and not self._rotated:
            raise OtherProjections("this ComfyUI does not rotate queries and keys where it did")
        self._arrived = self._rotary = None
        names = [stream] if stream in self._common else stream.split("+")
        lengths = [self._attention.group_lengths(name) for name in names]
        sizes = [of_ranks[self._ulysses.index] for of_ranks in lengths]
        by_name = [
            self._of_both(local, of_ranks, self._common.get(name, 0))
            for name, of_ranks, local in zip(
                names, lengths, zip(*(t.split(sizes, 2) for t in tensors), strict=True), strict=True
            )
        ]
        return [
            torch.cat([part for rank in range(RANKS) for of_name in by_name for part in of_name[rank][n]], 2)
            for n in range(len(tensors))
        ]

    def _of_both(
        self, tensors: tuple[Tensor, ...], lengths: tuple[int, ...], common: int
    ) -> list[list[tuple[Tensor, ...]]]:
        """For each rank, of each tensor its tokens in one or two parts. `lengths`: tokens of each rank."""
        halves = [t[:, :, :common].chunk(RANKS, 1) for t in tensors]
        rest = tuple(length - common for length in lengths)
        if not any(rest):
            return [[(of[rank],) for of in halves] for rank in range(RANKS)]
        half = self._heads // RANKS
        heads = [slice(0, half), slice(half, self._heads)]
        after = tuple(t[:, :, common:] for t in tensors)
        arrived = [t.split(rest, 2) for t in self._attention.to_heads(after, (heads,) * len(after), rest)()]
        return [
            [(first[rank], last[rank]) for first, last in zip(halves, arrived, strict=True)]
            for rank in range(RANKS)
        ]

    def _project(self, layer: Projection, module: nn.Linear, x: Tensor) -> Tensor:
        """[..., all heads of each part, rest] in place of the layer's own answer to this rank's tokens."""
        width = module.in_features if layer.rest else module.out_features // layer.parts
        half, mine, common = width // RANKS, self._ulysses.index, self._common[layer.stream]
        first = x.narrow(-2, 0, common)
        out = x.new_empty(*x.shape[:-1], module.out_features)

        def project(tokens: Tensor, rank: int) -> None:
            for part in range(layer.parts):
                rows, place = part * width + mine * half, part * width + rank * half
                self._give(module, slice(rows, rows + half), tokens, out[..., :common, place : place + half])

        theirs = self._exchanged(x, first)  # flies while what does not need it is computed
        project(first, mine)
        if layer.rest:
            begin = layer.parts * width
            self._give(module, slice(begin, module.out_features), first, out[..., :common, begin:])
        if common < x.shape[-2]:
            out[..., common:, :] = type(module).forward(module, x[..., common:, :])
        project(theirs(), 1 - mine)
        return out

    def _exchanged(self, x: Tensor, first: Tensor) -> Callable[[], Tensor]:
        """Begins to send the `first` tokens of x; the function that is returned waits for the other rank's."""
        sent, theirs = self._arrived or (None, x)
        if sent is x:  # queries, keys and values each have a layer
            return lambda: theirs
        channels = x.shape[-1] // self._heads if x.shape[-1] % self._heads == 0 else x.shape[-1]
        sizes = [first.numel(), first.numel()]
        sizes[self._ulysses.index] = 0
        received = self._attention.exchange(first.flatten(), tuple(sizes), tuple(sizes), channels)

        def arrive() -> Tensor:
            self._arrived = x, received().view(first.shape)
            return self._arrived[1]

        return arrive

    def _give(self, module: nn.Linear, rows: slice, x: Tensor, out: Tensor) -> None:
        """Writes some outputs of a layer into `out`: by its own code, or by what that does, which needs no copy."""
        parameters = {name: value for name, value in module._parameters.items() if value is not None}
        parts = {name: self._model.weight_rows(parameters[name], rows) for name in _ROWS & parameters.keys()}
        if x.ndim <= 3 and self._model.multiplies(module, x):
            for one, of_one in zip(x, out, strict=True) if x.ndim == 3 else [(x, out)]:
                if "bias" in parts:
                    torch.addmm(parts["bias"], one, parts["weight"].T, out=of_one)
                else:
                    torch.mm(one, parts["weight"].T, out=of_one)
            return
        module._parameters.update(parts)  # type: ignore[arg-type]
        try:
            out.copy_(type(module).forward(module, x))
        finally:
            module._parameters.update(parameters)

    def _norm(self, module: Any, x: Tensor) -> Tensor:
        """Norms all heads of each token, of which this rank has half, by their root mean square. In place."""
        (common,) = self._common.values()
        by_rank = x[..., :common, :].unflatten(-1, (RANKS, -1))
        squares = torch.linalg.vector_norm(by_rank, dim=-1, dtype=torch.float32).square()
        all_reduce(squares, self._ulysses, self._tokens.traffic)
        scales = torch.rsqrt(squares / x.shape[-1] + module.eps)
        weight = module.weight.to(x.device, torch.float32).chunk(RANKS)[self._ulysses.index]
        for rank in range(RANKS):
            local = by_rank.select(-2, rank)
            local.copy_(local.float() * scales.select(-1, rank).unsqueeze(-1) * weight)
        if common < x.shape[-2]:
            x[..., common:, :] = type(module).forward(module, x[..., common:, :])
        return x

    def _rotate(
        self, apply: Callable[[list[Tensor], Any], list[Tensor]], tensors: list[Tensor], by: Any, dim: int
    ) -> list[Tensor]:
        """base.Rotate: the halves of the heads, which lie in `dim`, are rotated as the tokens of their ranks."""
        if self._inside or self._rotary is None:
            return apply(tensors, by)
        share, argument = self._rotary
        if by is not share:
            raise OtherProjections("this ComfyUI rotates queries and keys by another argument than it did")
        self._inside = self._rotated = True
        try:
            halves = [
                apply(
                    [t.chunk(RANKS, dim)[rank] for t in tensors],
                    self._tokens.share_of(share, argument, self._first + rank, self._common),
                )
                for rank in range(RANKS)
            ]
        finally:
            self._inside = False
        return [torch.cat(pair, dim) for pair in zip(*halves, strict=True)]


def paired_projections(
    block: nn.Module,
    kind: Blocks,
    words: Projections,
    argument: Callable[[str], Any],
    model: ModuleModel,
    tokens: BlockTokens,
    layout: Layout,
    attention: Exchanges,
) -> PairedProjections | None:
    """Returns the projections of a call of a block; None where ranks exchange what projections give: they are more than
    two, one has no token, or the block has other layers than are known. Alike on all ranks. `argument`: gives one of
    the call by its name."""
    if layout.ulysses.size != RANKS or layout.tensor.size > 1:
        return None
    try:
        modules = {layer.path: block.get_submodule(layer.path) for layer in words.layers}
        norms = [block.get_submodule(path) for path in words.norms]
        heads = _heads(block, words)
    except AttributeError:
        return None
    if heads % RANKS or not all(_is_rms_norm(norm, model) for norm in norms):
        return None
    common = {
        layer.stream: min(attention.group_lengths(layer.stream))
        for layer in words.layers
        if all(map(all, map(attention.group_lengths, layer.stream.split("+"))))  # else a rank has a stand-in
    }
    layers = [layer for layer in words.layers if layer.stream in common]
    if not layers or not all(_has_rows(modules[layer.path], layer, heads, model) for layer in layers):
        return None
    rotary = None
    if words.rotary is not None and (share := argument(words.rotary)) is not None:
        form = kind.arguments[words.rotary]
        assert isinstance(form, Tokens), "rotation goes by token"
        rotary = share, form
    return PairedProjections(block, words, common, rotary, model, tokens, layout, attention)


def _heads(block: nn.Module, words: Projections) -> int:
    return int(operator.attrgetter(words.heads)(block))


def _has_rows(module: Any, layer: Projection, heads: int, model: ModuleModel) -> bool:
    """True for a layer whose own code computes with some rows of its weight if it is given those alone, and whose
    tokens are less than what it gives for them to half of the heads."""
    if not _is_plain(module) or not model.gives_rows(module):
        return False
    width = module.in_features if layer.rest else module.out_features // layer.parts
    less: bool = module.in_features * RANKS <= width * 3
    return width % heads == 0 and less


def _is_plain(module: nn.Module) -> bool:
    """True if nothing was put around the module's own forward."""
    return "forward" not in module.__dict__ and not module._forward_hooks and not module._forward_pre_hooks


def _is_rms_norm(module: nn.Module, model: ModuleModel) -> bool:
    return type(module).__name__ == "RMSNorm" and _is_plain(module) and model.gives_rows(module)
