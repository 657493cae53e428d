"""The memory of one model call of Flux at its fullest moment on one rank, in closed form.

The moments are those of diffusers' blocks and of engine/attention/sequence.py: what is alive is counted variable by
variable, and the fullest moment decides. A width is one number per token and channel: rows x tokens x hidden in the
compute dtype. Norms, modulation and log-sum-exps are left out: a hundredth of a width.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ...footprint import FP32, MemoryPeak, TokenLoad
from ..keys import FluxDims


def moments(dims: FluxDims, block: int, call: TokenLoad, cast: int = 0) -> Iterator[MemoryPeak]:
    """Moments of `block` (numbered doubles first). `cast`: bytes of its largest layer where layers are cast on use."""
    kind = _double_block if block < dims.double_blocks else _single_block
    # Cosines and sines, kept in float32 through the call: of all tokens, and of this rank's where these are fewer.
    everyone = sum(call.keys) if len(call.keys) > 1 else max(call.group, call.tokens)
    rotary = 2 * (everyone + call.tokens * (everyone > call.tokens)) * dims.head_dim * FP32
    for moment in kind(call, dims.mlp, cast):
        yield replace(moment, alive=moment.alive + rotary)


def _single_block(call: TokenLoad, mlp: int, cast: int) -> Iterator[MemoryPeak]:
    """A block with one stream."""
    width, part = call.width(call.tokens), call.width(call.tokens) // call.tensor
    wide = width * mlp // call.hidden // call.tensor
    held = 3 * width  # what comes in, the text and image joined, the normed
    yield MemoryPeak("feed-forward", held + wide + max(wide, cast))
    yield from _attention(call, held + wide + 3 * part, part)
    joined = held + wide + part + (part + wide)  # attention and feed-forward, and both next to each other
    yield MemoryPeak("output", joined + width + max(width, cast))


def _double_block(call: TokenLoad, mlp: int, cast: int) -> Iterator[MemoryPeak]:
    """A block with separate streams for text and image."""
    text, image, width = call.width(call.text), call.width(call.image), call.width(call.tokens)
    part, wider = width // call.tensor, mlp / call.hidden / call.tensor
    yield from _attention(call, 2 * width + 3 * part + 3 * (text // call.tensor), part)
    yield MemoryPeak(
        "feed-forward", 2 * width + text + 3 * image + int(wider * image) + max(int(wider * image), cast)
    )
    wide = int(wider * text)
    yield MemoryPeak("feed-forward of the text", 2 * width + 4 * image + 3 * text + wide + max(wide, cast))


def _attention(call: TokenLoad, held: int, part: int) -> Iterator[MemoryPeak]:
    """`held`: what is alive when queries, keys and values of all heads of this rank are there; `part`: one of them."""
    in_float = FP32 // call.element  # rotation and the merging of partial results are computed in float32
    yield MemoryPeak("rotation", held + part + 3 * in_float * part)
    if call.ulysses == 1:
        yield MemoryPeak("attention", held + part, _ring(call, part) - part)
        return
    mine = call.width(call.group) // call.tensor // call.ulysses  # all tokens of the group, this rank's heads
    yield MemoryPeak("exchange of tokens for heads", held, 3 * part + 3 * mine)
    yield MemoryPeak("attention", held + part, 3 * mine + _ring(call, mine) - part)
    reordered = mine if call.rows > 1 else 0  # with one row it lies as it is sent
    yield MemoryPeak("exchange of heads for tokens", held + part, 3 * mine + mine + reordered + part)


def _ring(call: TokenLoad, queries: int) -> int:
    """Bytes of attention's output, with what travels round a ring and the merging of its partial results."""
    if len(call.keys) == 1:
        return queries
    shares = min(3, len(call.keys))  # its own, the one it works on, the one on its way
    pair = 2 * call.width(max(call.keys)) // call.tensor // call.ulysses
    merging = (4 * (FP32 // call.element) + 1) * queries
    return shares * pair + merging
