"""The memory of a model on a rank: its weights part by part, and the activations at points of a model call."""

from __future__ import annotations

from dataclasses import dataclass

FP32 = 4  # bytes
# ComfyUI's attention_sub_quad computes this many queries at a time, or fewer if memory is short. So a job is never
# refused for more scores (bytes) than this.
MOST_QUERIES, MOST_SCORES = 4096, 2**31


@dataclass(frozen=True)
class WeightPart:
    """Parameters that are gathered and used together: the layers around the blocks (block None), or one block.

    All sizes in bytes. `private`: in this rank's own memory; `mapped`: used in place in the mapped file; `gathered`:
    the whole part, if ranks shard it, else 0; `cast`: its largest layer in the compute dtype, if layers cast on use.
    """

    block: int | None
    private: int
    mapped: int
    gathered: int
    cast: int


@dataclass(frozen=True)
class HeldWeights:
    """One rank's weights. `sharded`: it stores a shard, and gathers a part to compute it; `offloaded`: the shard is in
    host memory."""

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
        """Returns the gathered bytes while `part` computes: layers around the blocks, `part`, and the next part.

        On the CPU the next part arrives in one buffer, which is as large as the largest part.
        """
        if not self.sharded:
            return 0
        arriving = max(p.gathered for p in self.parts) if on_cpu else part.gathered
        return self.around.gathered + part.gathered + arriving


@dataclass(frozen=True)
class TokenLoad:
    """The tokens of one model call on one rank. `text`, `image`: its own tokens per row; `element`: bytes of a number.

    `hidden`: the model's width; `group`: tokens of its Ulysses group, which the all-to-all brings here for its heads;
    `keys`: tokens of each member of its ring; `ulysses`, `tensor`: degrees; `has_scores`: attention holds the scores of
    queries and keys in memory, as ComfyUI's does on the CPU.
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
        """Returns the bytes of `heads` heads' scores of this rank's queries and all keys, before and after softmax."""
        if not self.has_scores or len(self.keys) > 1:  # ring kernels store no scores
            return 0
        scores = 2 * self.rows * heads * min(self.tokens, MOST_QUERIES) * sum(self.keys) * FP32
        return min(int(scores), MOST_SCORES)


@dataclass(frozen=True)
class MemoryPeak:
    """The bytes alive at one point of a block; `exchanged`: further bytes, to exchange tokens with other ranks."""

    where: str
    alive: int
    exchanged: int = 0
