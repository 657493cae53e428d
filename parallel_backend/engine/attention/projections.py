"""Projections on two ranks that exchange tokens first: each rank projects the tokens of both for its own heads only.

Ulysses exchanges what the projections give: for each token half of its queries, keys and values, 1.5 times the token's
width. Two ranks send less if they exchange the tokens before projecting them: the width once. Each rank then projects
all tokens for half of the heads, which is the same amount of arithmetic. With more ranks, or if keys have at most half
as many heads as queries, this would not send less.

The block's own code runs between projection and attention (norms by head, rotation), so each layer's output keeps its
shape. In the first half of the heads' places it has this rank's heads of a token of the first rank; in the second half
this rank's heads of a token of the second rank. If one rank has more tokens, its surplus tokens are projected for all
heads as usual and exchanged afterwards.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ...models.base import ModuleModel
from ...models.tokens.regions import Projection, Projections, Tokens
from ..comm.collectives import all_reduce
from ..tokens.region_blocks import BlockInputs
from .sequence import SequenceAttention

RANKS = 2
_ROWS = {"weight", "bias"}  # parameters of a linear layer with one row per output


class OtherProjections(Exception):
    """The error for a block that passes queries and keys from its layers to its attention in an unknown way."""


@dataclass(eq=False)
class PairedProjections:
    """The projections of one call of a block. `_common`: for each stream that is exchanged before projection, how many
    tokens both ranks have; `_rotary`: this rank's share of the argument that rotates queries and keys, and its
    description; `_attention`: makes the exchanges."""

    _block: nn.Module
    _words: Projections
    _common: dict[str, int]
    _rotary: tuple[Any, Tokens] | None
    _model: ModuleModel
    _attention: SequenceAttention

    def __post_init__(self) -> None:
        layout = self._attention.layout
        self._ulysses = layout.ulysses
        self._first = layout.ring.index * RANKS  # index of the pair's first rank on the sequence axis
        self._heads = _heads(self._block, self._words)
        self._rotated = self._inside = False
        self._arrived: tuple[Tensor, Tensor] | None = None  # (tokens sent, tokens received)

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Replaces the forwards of the block's projections, their norms and the rotation inside the context."""
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
        """Turns each tensor [B, H, s, D], as the block gives it to its attention, into [B, H / 2, S, D]: this rank's
        heads, with tokens rank by rank, as after an exchange. Raises OtherProjections if the rotation was not seen."""
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
        """Returns for each rank and tensor the tokens in one or two parts. `lengths`: tokens per rank."""
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
        """Replaces the layer's forward for this rank's tokens; returns [..., all heads of each part, rest]."""
        width = module.in_features if layer.rest else module.out_features // layer.parts
        half, mine, common = width // RANKS, self._ulysses.index, self._common[layer.stream]
        first = x.narrow(-2, 0, common)
        out = x.new_empty(*x.shape[:-1], module.out_features)

        def project(tokens: Tensor, rank: int) -> None:
            for part in range(layer.parts):
                rows, place = part * width + mine * half, part * width + rank * half
                self._give(module, slice(rows, rows + half), tokens, out[..., :common, place : place + half])

        theirs = self._exchanged(x, first)  # on its way while this rank's own tokens are computed
        project(first, mine)
        if layer.rest:
            begin = layer.parts * width
            self._give(module, slice(begin, module.out_features), first, out[..., :common, begin:])
        if common < x.shape[-2]:
            out[..., common:, :] = type(module).forward(module, x[..., common:, :])
        project(theirs(), 1 - mine)
        return out

    def _exchanged(self, x: Tensor, first: Tensor) -> Callable[[], Tensor]:
        """Starts to exchange the `first` tokens of x; returns a function that waits for the other rank's tokens."""
        sent, theirs = self._arrived or (None, x)
        if sent is x:  # an earlier layer has exchanged these tokens (separate layers for q, k and v)
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
        """Writes the outputs `rows` of a layer into `out`: by a matmul without a copy, or by the layer's own code."""
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
        """Norms each token by the root mean square over all its heads, half of them on each rank. In place."""
        (common,) = self._common.values()
        by_rank = x[..., :common, :].unflatten(-1, (RANKS, -1))
        squares = torch.linalg.vector_norm(by_rank, dim=-1, dtype=torch.float32).square()
        all_reduce(squares, self._ulysses)
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
        """Rotates each half of the heads (in `dim`) by the places of the tokens that it belongs to. A base.Rotate."""
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
                    self._attention.tokens.share_of(share, argument, self._first + rank, self._common),
                )
                for rank in range(RANKS)
            ]
        finally:
            self._inside = False
        return [torch.cat(pair, dim) for pair in zip(*halves, strict=True)]


def paired_projections(
    inputs: BlockInputs, model: ModuleModel, attention: SequenceAttention
) -> PairedProjections | None:
    """Returns the projections of one call of a block, or None if ranks must exchange queries, keys and values instead:
    there are not two ranks, one has no token, or the block has unexpected layers or is not described. The result is the
    same on all ranks."""
    block = inputs.block
    module, words = block.module, block.kind.projections
    if words is None or words.rotary not in (None, *block.names):
        return None
    if attention.layout.ulysses.size != RANKS or attention.layout.tensor.size > 1:
        return None
    try:
        modules = {layer.path: module.get_submodule(layer.path) for layer in words.layers}
        norms = [module.get_submodule(path) for path in words.norms]
        heads = _heads(module, words)
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
    if words.rotary is not None and (share := inputs.get(words.rotary)) is not None:
        form = block.kind.arguments[words.rotary]
        assert isinstance(form, Tokens), "rotation goes by token"
        rotary = share, form
    return PairedProjections(module, words, common, rotary, model, attention)


def _heads(block: nn.Module, words: Projections) -> int:
    return int(operator.attrgetter(words.heads)(block))


def _has_rows(module: Any, layer: Projection, heads: int, model: ModuleModel) -> bool:
    """Returns True if the layer can compute with only some rows of its weight, and if a token's input is no wider than
    its queries, keys and values for half of the heads."""
    if not _is_plain(module) or not model.gives_rows(module):
        return False
    width = module.in_features if layer.rest else module.out_features // layer.parts
    less: bool = module.in_features * RANKS <= width * 3
    return width % heads == 0 and less


def _is_plain(module: nn.Module) -> bool:
    """Returns True if the module runs its class's forward without hooks."""
    return "forward" not in module.__dict__ and not module._forward_hooks and not module._forward_pre_hooks


def _is_rms_norm(module: nn.Module, model: ModuleModel) -> bool:
    return type(module).__name__ == "RMSNorm" and _is_plain(module) and model.gives_rows(module)
