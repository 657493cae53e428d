"""What each strategy sends in one denoising step: messages, bytes and who talks to whom, in closed form."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache

from ...models.catalog import Family
from ...strategy import DEGREES, ParallelStrategy
from ..machine.cards import Interconnect, LinkLoad

ACTIVATION_BYTES = 2  # bf16 activations


@dataclass(frozen=True)
class Work:
    """One sampling job. `width`, `height`: pixels; `rows`: rows per image, 2 with CFG; `storage`: bytes per weight;
    `step_cache`: it keeps residuals, which times do not count with."""

    family: Family
    width: int = 1024
    height: int = 1024
    frames: int = 1
    batch: int = 1
    rows: int = 1
    steps: int = 28
    storage: float = 2.0
    text: int | None = None
    step_cache: bool = False

    @property
    def image_tokens(self) -> int:
        return self.family.image_tokens(self.width, self.height, self.frames)

    @property
    def text_tokens(self) -> int:
        return self.family.text_tokens if self.text is None else self.text

    @property
    def all_rows(self) -> int:
        return self.batch * self.rows

    @property
    def weight_bytes(self) -> float:
        return self.family.parameters * self.storage

    @property
    def flop(self) -> float:
        """FLOPs of one denoising step: all rows."""
        linear, attention = self.flop_parts
        return linear + attention

    @property
    def flop_parts(self) -> tuple[float, float]:
        """(linear, attention) FLOPs of one denoising step: all rows."""
        f = self.family
        if not f.is_transformer:  # convolutions dominate: in proportion to the pixels
            return self.all_rows * f.image_flop * self.width * self.height / 1024**2, 0.0
        image, text = self.image_tokens, self.text_tokens
        return self.all_rows * f.linear_flop(image, text), self.all_rows * f.attention_flop(image, text)


@dataclass(frozen=True)
class Candidate:
    """A strategy with what else decides its cost. `patches`: of PipeFusion, 0 for one per stage.

    `shard_weights`: each rank keeps 1/world of the weights and gathers a block when it needs it (FSDP).
    `gathered_ring`: keys and values are gathered before attention instead of passed round while it runs.
    """

    strategy: ParallelStrategy = field(default_factory=ParallelStrategy)
    shard_weights: bool = False
    patches: int = 0
    warmup_steps: int = 1
    gathered_ring: bool = False

    @property
    def exact(self) -> bool:
        """PipeFusion computes with keys and values of the step before; all else gives one device's result."""
        return self.strategy.pipefusion_degree == 1

    @property
    def patch_count(self) -> int:
        return self.patches or self.strategy.pipefusion_degree

    def describe(self) -> str:
        extra = " with sharded weights" if self.shard_weights else ""
        return self.strategy.describe() + extra


@dataclass(frozen=True)
class Transfer:
    """All messages of one kind in one step. `sent`: bytes from one rank; `calls`: collectives or hops it joins."""

    kind: str  # "ulysses", "ring", "tensor", "pipefusion", "weights" or "rows"
    calls: int
    sent: float


def exchanges(work: Work, candidate: Candidate) -> tuple[Transfer, ...]:
    """Everything a rank sends in one step under `candidate` (DeepSpeed-Ulysses §3.2; Megatron-LM §3; PipeFusion §4)."""
    s, f = candidate.strategy, work.family
    rows = -(-work.all_rows // s.row_degree)
    per_stage = 1 / s.pipefusion_degree
    found = []
    ulysses, ring, tensor = s.ulysses_degree, s.ring_degree, s.tensor_degree
    sent = {"ulysses": 0.0, "ring": 0.0, "tensor": 0.0}
    reduces = 0.0
    for blocks in f.blocks:
        moved = f.split_tokens(work.image_tokens, work.text_tokens, blocks)
        layer = blocks.count * per_stage * rows * f.hidden / tensor * ACTIVATION_BYTES
        local = moved / s.sequence_degree
        # q, k, v and the output: each rank keeps 1/U of what it has and sends the rest.
        sent["ulysses"] += 4 * layer * local * (ulysses - 1) / ulysses
        # k and v of 1/R of the tokens, for 1/U of the heads, passed on R - 1 times.
        sent["ring"] += 2 * layer * (moved / ring) * (ring - 1) / ulysses
        # An all-reduce sends 2 (T - 1) / T of the full width.
        tokens = (work.image_tokens + work.text_tokens) / s.sequence_degree
        sent["tensor"] += 2 * blocks.reduces * layer * tensor * tokens * (tensor - 1) / tensor
        reduces += blocks.reduces * blocks.count * per_stage
    count = f.block_count * per_stage
    if ulysses > 1:
        found.append(Transfer("ulysses", round(4 * count), sent["ulysses"]))
    if ring > 1:
        found.append(Transfer("ring", round(count * (ring - 1)), sent["ring"]))
    if tensor > 1:
        found.append(Transfer("tensor", round(reduces), sent["tensor"]))
    if s.pipefusion_degree > 1:
        tokens = (work.image_tokens + work.text_tokens) / s.sequence_degree
        sent_on = rows * tokens * f.hidden * ACTIVATION_BYTES
        found.append(Transfer("pipefusion", candidate.patch_count, sent_on))
    if candidate.shard_weights and s.world_size > 1:
        share = work.weight_bytes / (tensor * s.pipefusion_degree) / s.world_size
        found.append(Transfer("weights", round(count), share * (s.world_size - 1)))
    if s.row_degree > 1:
        latent = work.image_tokens * 64 * 4 * rows  # one patch: 64 numbers in fp32
        found.append(Transfer("rows", 1, latent * (s.row_degree - 1)))
    return tuple(found)


def axis_groups(strategy: ParallelStrategy, axis: str) -> list[list[int]]:
    """Rank groups along one degree, in ParallelStrategy's layout (the last degree varies fastest)."""
    degrees = [getattr(strategy, name) for name in DEGREES]
    at = DEGREES.index(axis)
    stride = 1
    for degree in degrees[at + 1 :]:
        stride *= degree
    size, world = degrees[at], strategy.world_size
    starts = [r for r in range(world) if (r // stride) % size == 0]
    return [[start + i * stride for i in range(size)] for start in starts]


@lru_cache(maxsize=4096)
def unit_load(link: Interconnect, strategy: ParallelStrategy, kind: str) -> LinkLoad:
    """What an exchange of one byte per rank puts on the link when all groups of the strategy run it together."""
    if kind == "ulysses":
        groups = axis_groups(strategy, "ulysses_degree")
        return link.load((a, b, 1 / (len(g) - 1)) for g in groups for a in g for b in g if a != b)
    if kind == "weights":
        groups = [list(range(strategy.world_size))]
    elif kind == "rows":
        axis = "cfg_degree" if strategy.cfg_degree > 1 else "data_degree"
        groups = axis_groups(strategy, axis)
    else:
        groups = axis_groups(strategy, f"{kind}_degree")
    # A ring: NCCL's all-reduce and all-gather, ring attention, and the stages of a pipeline.
    return link.load((a, g[(i + 1) % len(g)], 1.0) for g in groups for i, a in enumerate(g))
