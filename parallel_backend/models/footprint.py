"""The memory of a model on a rank: its weights part by part, and what is alive at the moments of a model call."""

from __future__ import annotations

from dataclasses import dataclass

FP32 = 4  # bytes
# ComfyUI's attention_sub_quad takes so many queries at a time, and fewer where memory is short: what more scores than
# these would take is no reason to refuse a job.
MOST_QUERIES, MOST_SCORES = 4096, 2**31


@dataclass(frozen=True)
class WeightPart:
    """Parameters that are gathered and used together: the layers around the blocks (block None), or one block.

    `private`: bytes in this rank's own memory; `mapped`: bytes used in place in the mapped file; `gathered`: all of it,
    where each rank keeps a share only; `cast`: of its largest layer in the compute dtype, where layers cast on use.
    """

    block: int | None
    private: int
    mapped: int
    gathered: int
    cast: int


@dataclass(frozen=True)
class HeldWeights:
    """One rank's weights. `sharded`: it keeps its share and gathers a part when it needs it; `offloaded`: that share
    lies in host memory."""

    parts: tuple[WeightPart, ...]
    sharded: bool
    offloaded: bool

    @property
    def private(self) -> int:
        return sum(part.private for part in self.parts)

    @property
    def mapped(self) -> int:
        return sum(part.mapped for part in self.parts)

    @property
    def around(self) -> WeightPart:
        return self.parts[0]

    def in_flight(self, part: WeightPart, on_cpu: bool) -> int:
        """Gathered bytes while `part` computes: around the blocks, its own, and what arrives for the next.

        On the CPU everything arrives in the same memory, as large as the largest part.
        """
        if not self.sharded:
            return 0
        arriving = max(p.gathered for p in self.parts) if on_cpu else part.gathered
        return self.around.gathered + part.gathered + arriving


@dataclass(frozen=True)
class TokenLoad:
    """The tokens of one model call on one rank. `text`, `image`: its own, per row; `element`: bytes of a number.

    `hidden`: the model's width; `group`: tokens of its Ulysses group, which meet here for its share of the heads;
    `keys`: tokens whose keys and values each member of its ring brings; `tensor`: ranks that share the heads and the
    feed-forward columns; `has_scores`: attention keeps the weights of its queries and keys in memory, as ComfyUI's does
    on the CPU.
    """

    rows: int
    text: int
    image: int
    hidden: int
    element: int
    group: int
    keys: tuple[int, ...]
    ulysses: int = 1
    tensor: int = 1
    has_scores: bool = False

    @property
    def tokens(self) -> int:
        return self.text + self.image

    def width(self, tokens: int) -> int:
        return self.rows * tokens * self.hidden * self.element

    def scores(self, heads: float) -> int:
        """Bytes of `heads`' weights of this rank's queries and all keys, before and after their softmax."""
        if not self.has_scores or len(self.keys) > 1:  # a ring's kernel keeps none
            return 0
        scores = 2 * self.rows * heads * min(self.tokens, MOST_QUERIES) * sum(self.keys) * FP32
        return min(int(scores), MOST_SCORES)


@dataclass(frozen=True)
class MemoryPeak:
    """The bytes alive at one point of a block: `exchanged` bytes of it only because ranks exchange tokens."""

    where: str
    alive: int
    exchanged: int = 0

    @property
    def total(self) -> int:
        return self.alive + self.exchanged
