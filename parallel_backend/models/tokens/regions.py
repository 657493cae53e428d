"""The words of table.py: which arguments of a module's blocks are tokens. Pure data, without torch and without comfy.

A stream is a sequence of tokens that goes through blocks ("img", "txt"); "txt+img" is one after the other in one
tensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Tokens:
    """A tensor, or tensors in a tuple, whose dims [dim, dim + over) are the tokens of `stream`.

    `grouped`: it may have fewer entries than tokens, each for equally many in a row, the last for the rest (one
    timestep per frame); `ndim`: tensors with another number of dims have no tokens; `item`: only this item of a tuple
    has them; `passed`: made of what blocks before gave, so that it may be a share already.
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
    """(first, end, …) tuples that name tokens of `stream`; an end of None is the stream's."""

    stream: str


@dataclass(frozen=True)
class FirstToken:
    """The number of a token of `stream`: those from it on are treated otherwise."""

    stream: str


@dataclass(frozen=True)
class Window:
    """Attention of the tokens of `stream` to those not further away than an attribute of the block says, by its path;
    None there means all. The mask that a block makes of its share is left for one of all tokens."""

    stream: str
    attribute: str


@dataclass(frozen=True)
class Guided:
    """Attention of the tokens of `stream` under what the block's argument of this name holds where it is no tensor: by
    how much each query is drawn to each key (LTX's guides), in parts by where queries lie."""

    stream: str
    argument: str


Argument = Tokens | ExpandingTimestep | Ranges | FirstToken


Attends = str | tuple[str | None, str | None] | Window | Guided | None


@dataclass(frozen=True)
class Projection:
    """A linear layer inside a block, by its path, that takes tokens of `stream` and gives `parts` of the same width
    (queries, keys and values), each of all heads; `rest`: as wide as the layer's input, and then what has no heads."""

    path: str
    stream: str
    parts: int = 3
    rest: bool = False


@dataclass(frozen=True)
class Projections:
    """The layers that give the queries, keys and values of a block's first attention, all with as many heads.

    `heads`: the attribute of the block that counts these, by its path; `rotary`: the block's argument by which queries
    and keys are rotated, token by token; `norms`: modules inside, by path, that norm all heads of a token together.
    """

    layers: tuple[Projection, ...]
    heads: str
    rotary: str | None = None
    norms: tuple[str, ...] = ()


@dataclass(frozen=True)
class Branch:
    """Linear layers of a block by their paths: `into` give heads or hidden channels, `out` gives the token's width of
    them again. `heads`: the attribute that counts the channels of all heads, where layers have hidden channels behind
    or beside those of queries, keys and values. What a block does not have is left out."""

    into: tuple[str, ...]
    out: str
    heads: str = ""


@dataclass(frozen=True)
class Sliced:
    """How tensor parallelism cuts the layers of a block (Megatron-LM, Shoeybi et al. 2019, §3).

    `counts`: attributes, by path, that count heads or channels of them; `joined`: layers over few tokens, which give
    every rank all that they give (modulation); `norms`: modules that norm all heads of a token together; `replicated`:
    linear layers that every rank has. A block with other linear layers is refused.
    """

    branches: tuple[Branch, ...]
    counts: tuple[str, ...]
    joined: tuple[str, ...] = ()
    norms: tuple[str, ...] = ()
    replicated: tuple[str, ...] = ()


@dataclass(frozen=True)
class Blocks:
    """The tokens that a kind of block takes and gives.

    `arguments`: by name, or by number where its forward has *args. `gives`: the arguments that its outputs replace, in
    order; None for an output without tokens. `attends`: of each call of attention inside, in turn, the stream whose
    tokens are shared out; (queries', keys') where they differ; None where the keys are whole on every rank (text).
    `whole`: modules inside, by path, that look at several tokens outside of attention (sound for each frame): their
    first argument is gathered, and what they give is cut again. `projections`: None where nobody has described them, or
    where keys have fewer heads than queries, so that less is sent after they were projected. `sliced`: None where
    nobody has described how its layers can be cut.
    """

    arguments: Mapping[str | int, Argument]
    gives: tuple[str | int | None, ...]
    attends: tuple[Attends, ...]
    whole: Mapping[str, Tokens] = field(default_factory=dict)
    projections: Projections | None = None
    sliced: Sliced | None = field(default=None, repr=False)  # no part of what a class's proof is about


LAST_BLOCK = "the last block"


@dataclass(frozen=True)
class Region:
    """Blocks through which tokens may stay apart. `lists`: lists of blocks by their path in the module, in order.

    `leave`: the module whose first argument must be whole again (LAST_BLOCK: what the last block gives; None: what each
    block gives, so tokens never stay apart); `leaves`: the stream of that argument.
    """

    lists: Mapping[str, Blocks]
    leave: str | None = None
    leaves: str | Tokens | None = None
