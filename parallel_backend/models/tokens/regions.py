"""The classes of which table.py is made: they say which arguments of blocks are tokens. No torch, no comfy.

A stream is a sequence of tokens that goes through blocks ("img", "txt"). "txt+img": both in one tensor, text first.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Tokens:
    """A tensor, or a tuple of tensors, whose dims [dim, dim + over) are the tokens of `stream`.

    `grouped`: it may have fewer entries than tokens, each for the same number of consecutive tokens, the last for the
    rest (one timestep per frame); `ndim`: if set, only tensors with this number of dims have tokens; `item`: only this
    item of a tuple has tokens; `passed`: earlier blocks made it, so it may be a shard already.
    """

    stream: str
    dim: int = 1
    over: int = 1
    grouped: bool = False
    ndim: int | None = None
    item: int | None = None
    passed: bool = False


@dataclass(frozen=True)
class ExpandingTimestep:
    """An object of LTX-2 that holds one timestep per frame and expands to one per token of `stream`."""

    stream: str


@dataclass(frozen=True)
class Ranges:
    """Tuples (first, end, …) that select ranges of tokens of `stream`; an end of None is the end of the stream."""

    stream: str


@dataclass(frozen=True)
class FirstToken:
    """The index of a token of `stream`. Tokens from there on are treated differently."""

    stream: str


@dataclass(frozen=True)
class Window:
    """Attention between tokens of `stream` up to a distance, which the block's `attribute` (a path) holds; None means
    all. A block makes a mask for its shard only, so a mask for all tokens replaces it."""

    stream: str
    attribute: str


@dataclass(frozen=True)
class Guided:
    """Attention of the tokens of `stream` with LTX's guides: an object, not a tensor, in the block's `argument`. It
    holds what is added to the scores of queries and keys, in parts by ranges of queries."""

    stream: str
    argument: str


Argument = Tokens | ExpandingTimestep | Ranges | FirstToken


Attends = str | tuple[str | None, str | None] | Window | Guided | None


@dataclass(frozen=True)
class Projection:
    """A linear layer at `path` in a block. It takes tokens of `stream` and outputs `parts` of equal width (queries,
    keys, values), each with all heads. `rest`: parts are as wide as the input, and channels without heads follow."""

    path: str
    stream: str
    parts: int = 3
    rest: bool = False


@dataclass(frozen=True)
class Projections:
    """The layers that give queries, keys and values of a block's first attention, all with the same number of heads.

    `heads`: path of the block's attribute with that number; `rotary`: the block's argument that rotates queries and
    keys, token by token; `norms`: paths of modules that normalise all heads of a token as one vector.
    """

    layers: tuple[Projection, ...]
    heads: str
    rotary: str | None = None
    norms: tuple[str, ...] = ()


@dataclass(frozen=True)
class Branch:
    """Linear layers of a block, by path. `into`: layers that output heads or hidden channels; `out`: the layer that
    projects these back to the width of a token; `heads`: path of the attribute with the number of channels of all
    heads, if layers also have hidden channels, else "". Layers that a block does not have are ignored."""

    into: tuple[str, ...]
    out: str
    heads: str = ""


@dataclass(frozen=True)
class Sliced:
    """How tensor parallelism cuts the layers of a block (Megatron-LM, Shoeybi et al. 2019, §3).

    All by path. `counts`: attributes with numbers of heads or of their channels; `joined`: layers over few tokens
    (modulation), whose outputs are gathered on every rank; `norms`: modules that normalise all heads of a token as one
    vector; `replicated`: linear layers that stay whole on every rank. A block with other linear layers is refused.
    """

    branches: tuple[Branch, ...]
    counts: tuple[str, ...]
    joined: tuple[str, ...] = ()
    norms: tuple[str, ...] = ()
    replicated: tuple[str, ...] = ()


@dataclass(frozen=True)
class Blocks:
    """The tokens that a kind of block takes and returns.

    `arguments`: by name, or by index if its forward has *args. `gives`: for each output, the argument that it replaces
    in the next block, or None if it has no tokens. `attends`: for each attention call in order, the stream whose tokens
    are sharded; (of queries, of keys) if they differ; None if every rank has all keys (text). `whole`: modules inside,
    by path, that mix tokens outside of attention (sound for each frame): their first argument is gathered, and their
    output is sharded again. `projections`: None if not described, or if keys have fewer heads than queries, so that
    sending keys and values is cheaper than sending tokens. `sliced`: None if its layers cannot be cut.
    """

    arguments: Mapping[str | int, Argument]
    gives: tuple[str | int | None, ...]
    attends: tuple[Attends, ...]
    whole: Mapping[str, Tokens] = field(default_factory=dict)
    projections: Projections | None = None
    sliced: Sliced | None = field(default=None, repr=False)  # not part of what a class's proof covers


LAST_BLOCK = "the last block"


@dataclass(frozen=True)
class Region:
    """Blocks between which tokens may stay sharded. `lists`: lists of blocks by their path in the module, in order.

    `leave`: the module after them whose first argument must be whole again; LAST_BLOCK: the output of the last block
    must be whole; None: every block's output must be, so tokens never stay sharded. `leaves`: stream of that argument.
    """

    lists: Mapping[str, Blocks]
    leave: str | None = None
    leaves: str | Tokens | None = None
