"""Predicts the memory of each rank from the sizes of a Flux model, a strategy and a request. Pure functions.

Weights (memory_weights.py), the fullest moment of a model call (memory_activations.py), and what lies beside it:
latents, prompts, PipeFusion's messages and its keys of the step before. benchmarks/memory.py compares it with what
ranks really use.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ...layout import RankCoordinates, split_sizes
from ...models.flux.activation_bytes import FP32, Call, Moment, double_block, single_block
from ...models.flux.keys import FluxDims
from ...models.flux.weight_bytes import ITEMSIZE, Dtypes, Part, chunks_of, held_weights, token_shares
from ...strategy import ParallelStrategy
from .pipeline_messages import Messages, PipelineRound

# A CUDA context, NCCL's channels and the allocator's slack, on each GPU: an allowance, not measured here.
GPU_BASE_BYTES = 1_500_000_000
# Private memory of an idle rank on the CPU, torch and diffusers imported (benchmarks/memory.py measures it).
CPU_BASE_BYTES = 295_000_000
LATENT_CHANNELS = 16
PATCH_CHANNELS = 64  # of a token: 2 x 2 latent pixels


@dataclass(frozen=True)
class Job:
    """One sampling job. `height`, `width`: of the latent (pixels / 8); `prompts`: 2 with CFG, else 1; `step_cache`:
    residuals are kept from one model call to the next."""

    height: int
    width: int
    text_tokens: int = 512
    images: int = 1
    prompts: int = 1
    steps: int = 20
    step_cache: bool = False

    @property
    def image_tokens(self) -> int:
        return -(-self.height // 2) * -(-self.width // 2)

    @property
    def latent_bytes(self) -> int:
        """Of one image, float32."""
        return self.height * self.width * LATENT_CHANNELS * FP32


@dataclass(frozen=True)
class RankMemory:
    """Predicted bytes of one rank at its fullest moment.

    `weights`: in the rank's own memory, gathered ones included; `activations`, `buffers`: what a model call holds, and
    what lies beside it or travels; `base`: the process itself. `mapped`: weights used in place in the mapped file that
    all ranks share (CPU only); `host`: weights kept in pinned host memory (offload). `fullest`: where the peak is.
    """

    rank: int
    weights: int
    activations: int
    buffers: int
    base: int
    mapped: int = 0
    host: int = 0
    fullest: str = ""

    @property
    def private_bytes(self) -> int:
        """What this rank takes that no other can share: on a GPU its device memory."""
        return self.weights + self.activations + self.buffers + self.base

    @property
    def growth(self) -> int:
        """The same beyond the process itself: what a job adds to an idle rank."""
        return self.private_bytes - self.base

    @property
    def shared_bytes(self) -> int:
        return self.mapped

    def describe(self) -> str:
        """In words, e.g. `26.1 GiB (weights 22.2, activations 0.6, buffers 1.9, the process itself 1.4)`."""
        parts = (
            f"{in_gib(self.private_bytes)} GiB (weights {in_gib(self.weights)}, activations "
            f"{in_gib(self.activations)}, buffers {in_gib(self.buffers)}, the process itself {in_gib(self.base)})"
        )
        if self.mapped:
            parts += f" and {in_gib(self.mapped)} GiB of the model's file, shared by all ranks"
        if self.host:
            parts += f" and {in_gib(self.host)} GiB of host memory"
        return parts


def in_gib(size: float) -> str:
    """Bytes as GiB, two digits below ten."""
    gib = size / 2**30
    return f"{gib:.2f}" if gib < 10 else f"{gib:.1f}"


def predict_memory(
    dims: FluxDims,
    file_dtype: str,
    strategy: ParallelStrategy,
    job: Job,
    *,
    weight_dtype: str = "auto",
    on_cpu: bool = False,
) -> tuple[RankMemory, ...]:
    """Of every rank of `strategy`, in rank order."""
    dtypes = Dtypes.of(weight_dtype, file_dtype, on_cpu)
    return tuple(
        _of_rank(dims, dtypes, strategy, job, rank, on_cpu=on_cpu) for rank in range(strategy.world_size)
    )


def fullest_rank(memories: tuple[RankMemory, ...]) -> RankMemory:
    return max(memories, key=lambda memory: memory.private_bytes)


def _of_rank(
    dims: FluxDims, dtypes: Dtypes, strategy: ParallelStrategy, job: Job, rank: int, *, on_cpu: bool
) -> RankMemory:
    place = RankCoordinates.of(strategy, rank)
    weights = held_weights(dims, dtypes, strategy, rank, on_cpu=on_cpu)
    rows = split_sizes(job.images * job.prompts, strategy.row_degree)[place.row(strategy)]
    if strategy.pipefusion_degree > 1:
        runs = list(_pipeline_runs(dims, dtypes, strategy, job, place, rows))
    else:
        whole = _call(dims, dtypes, strategy, place, rows, job.text_tokens, job.image_tokens)
        blocks = range(dims.double_blocks + dims.single_blocks)
        # What the first block and the others added to the image; while they compute, its image in place of the latter.
        cached = 2 * whole.width(whole.image) if job.step_cache else 0
        runs = [_Run(whole, blocks, cached, "whole images")] if rows else []
    around = _latents(job, rows, dims, on_cpu=on_cpu)
    best = RankMemory(rank, weights.around.gathered, 0, around, 0)
    parts = {part.block: part for part in weights.parts}
    for run in runs:
        # Blocks of one kind are alike but for their layers' dtypes.
        kinds = {(b < dims.double_blocks, parts[b].cast, parts[b].gathered): b for b in reversed(run.blocks)}
        for block in kinds.values():
            for moment in _moments(dims, parts[block], run.call):
                found = RankMemory(
                    rank,
                    weights=weights.in_flight(parts[block], on_cpu),
                    activations=moment.alive + run.call.rotary,
                    buffers=around + moment.exchanged + run.beside,
                    base=0,
                    fullest=f"{moment.where}, {run.name}",
                )
                best = max(best, found, key=lambda memory: memory.private_bytes)
    own, host = (0, weights.own) if weights.offloaded else (weights.own, 0)
    return RankMemory(
        rank,
        weights=best.weights + own,
        activations=best.activations,
        buffers=best.buffers,
        base=CPU_BASE_BYTES if on_cpu else GPU_BASE_BYTES,
        mapped=weights.mapped,
        host=host,
        fullest=best.fullest,
    )


@dataclass(frozen=True)
class _Run:
    """A model call through `blocks`, and the bytes `beside` it: a pipeline's messages, its keys of the step before."""

    call: Call
    blocks: range
    beside: int
    name: str


def _moments(dims: FluxDims, part: Part, call: Call) -> Iterator[Moment]:
    block = double_block if part.block < dims.double_blocks else single_block
    return block(call, part.cast)


def _call(
    dims: FluxDims,
    dtypes: Dtypes,
    strategy: ParallelStrategy,
    place: RankCoordinates,
    rows: int,
    text: int,
    image: int,
    keys: tuple[int, ...] = (),
) -> Call:
    """`text` + `image` tokens of a row, over the sequence axis. `keys`: what the ring's members bring, if not these."""
    ulysses = strategy.ulysses_degree
    totals = token_shares(strategy, place, text + image)
    texts = token_shares(strategy, place, text)
    members = tuple(sum(totals[i : i + ulysses]) for i in range(0, len(totals), ulysses))
    index = place.ring * ulysses + place.ulysses
    return Call(
        rows=rows,
        text=texts[index],
        image=totals[index] - texts[index],
        hidden=dims.hidden,
        mlp=dims.mlp,
        head_dim=dims.head_dim,
        element=ITEMSIZE[dtypes.compute],
        group=members[place.ring],
        keys=keys or members,
        ulysses=ulysses,
        tensor=strategy.tensor_degree,
    )


def _pipeline_runs(
    dims: FluxDims, dtypes: Dtypes, strategy: ParallelStrategy, job: Job, place: RankCoordinates, rows: int
) -> Iterator[_Run]:
    """Whole images while warming up, one row after the other, and patches after that."""
    if not rows:
        return
    stages, chunks = strategy.pipefusion_degree, chunks_of(dims, strategy, place)
    turn = PipelineRound(len(chunks), is_first=place.stage == 0, is_last=place.stage == stages - 1)
    whole = _call(dims, dtypes, strategy, place, 1, job.text_tokens, job.image_tokens)
    output = whole.image * PATCH_CHANNELS * FP32  # of one row, as it leaves the model
    # Keys and values of a layer for every token that this member of the ring holds, for its share of the heads.
    layer = 2 * whole.width(whole.group) // strategy.ulysses_degree
    flows = strategy.warmup_steps < job.steps
    if flows:
        patches = min(strategy.pipeline_patches, job.image_tokens)
        # Patches of a turn (engine/patch_flow.py): the first brings the text along.
        texts = (job.text_tokens, *[0] * (min(2 * stages, patches) - 1))
        image = -(-job.image_tokens // patches)
        calls = [_call(dims, dtypes, strategy, place, 1, text, image, keys=whole.keys) for text in texts]
        items = [call for call in calls for _ in range(rows)]
        messages = [call.width(call.tokens) for call in items]
        beside = rows * (layer * sum(map(len, chunks)) + output * (turn.is_first or turn.is_last))
        fullest = {}  # calls of a size are alike but for the messages
        for moment in turn.moments(messages, before=messages):
            key = moment.chunk, messages[moment.item]
            fullest[key] = max(fullest.get(key, moment), moment, key=lambda moment: moment.held)
        for moment in fullest.values():
            yield from _chunk(items[moment.item], chunks[moment.chunk], moment, beside, "patches")
    if strategy.warmup_steps > 0:
        message, outputs = whole.width(whole.tokens), (rows - 1) * output * turn.is_last
        first, before = 0, 0
        while first < rows:
            size = min(stages, rows - first)
            for moment in turn.moments([message] * size, before=[message] * before):
                # The last whole image leaves its keys and values to the patches, layer by layer.
                done = first * sum(map(len, chunks)) + size * sum(map(len, chunks[: moment.chunk]))
                layers = done + (moment.item + 1) * len(chunks[moment.chunk])
                beside = outputs + layers * layer * flows
                yield from _chunk(whole, chunks[moment.chunk], moment, beside, "whole images")
            first, before = first + size, size


def _chunk(call: Call, blocks: range, messages: Messages, beside: int, name: str) -> Iterator[_Run]:
    """A chunk's first block works on the message itself; the others beside it."""
    beside += messages.held
    yield _Run(call, blocks[:1], beside, name)
    yield _Run(call, blocks[1:], beside + messages.received, name)


def _latents(job: Job, rows: int, dims: FluxDims, *, on_cpu: bool) -> int:
    """Latents and prompts that lie beside a model call.

    The sampler's latent and the last denoised one, the rows' latents joined and packed; on a GPU also noise, the latent
    that came in, and the prompts (on the CPU these stay in the memory that the request came in).
    """
    latent = job.latent_bytes * job.images
    joined = rows > 1
    own = 2 * latent + rows * job.latent_bytes * (1 + joined)
    prompts = rows * job.text_tokens * dims.context_dim * FP32
    return own + (prompts if joined or not on_cpu else 0) + (0 if on_cpu else 2 * latent)
