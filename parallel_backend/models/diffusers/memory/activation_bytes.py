"""The peak memory of one model call of Flux on one rank, in closed form.

Moments in diffusers' blocks and in engine/attention/sequence.py are counted: the bytes of each variable that is alive
then. The largest moment is the peak. A width is the bytes of one tensor of rows x tokens x hidden in the compute dtype.
Norms, modulation and log-sum-exps are left out: they take a hundredth of a width.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ...footprint import FP32, MemoryPeak, TokenLoad
from ..keys import FluxDims


def moments(dims: FluxDims, block: int, call: TokenLoad, cast: int = 0) -> Iterator[MemoryPeak]:
    """Yields the moments of `block` (doubles come first). `cast`: bytes of its largest layer if layers cast on use."""
    kind = _double_block if block < dims.double_blocks else _single_block
    # Cosines and sines stay in float32 during the call: for all tokens, and again for this rank's if these are fewer.
    everyone = sum(call.keys) if len(call.keys) > 1 else max(call.group, call.tokens)
    rotary = 2 * (everyone + call.tokens * (everyone > call.tokens)) * dims.head_dim * FP32
    for moment in kind(call, dims.mlp, cast):
        yield replace(moment, alive=moment.alive + rotary)


def _single_block(call: TokenLoad, mlp: int, cast: int) -> Iterator[MemoryPeak]:
    """Yields the moments of a block with one stream."""
    width, part = call.width(call.tokens), call.width(call.tokens) // call.tensor
    wide = width * mlp // call.hidden // call.tensor
    held = 3 * width  # the input, text and image joined, and the normed tokens
    yield MemoryPeak("feed-forward", held + wide + max(wide, cast))
    yield from _attention(call, held + wide + 3 * part, part)
    joined = held + wide + part + (part + wide)  # attention, feed-forward, and both concatenated
    yield MemoryPeak("output", joined + width + max(width, cast))


def _double_block(call: TokenLoad, mlp: int, cast: int) -> Iterator[MemoryPeak]:
    """Yields the moments of a block with separate streams for text and image."""
    text, image, width = call.width(call.text), call.width(call.image), call.width(call.tokens)
    part, wider = width // call.tensor, mlp / call.hidden / call.tensor
    yield from _attention(call, 2 * width + 3 * part + 3 * (text // call.tensor), part)
    yield MemoryPeak(
        "feed-forward", 2 * width + text + 3 * image + int(wider * image) + max(int(wider * image), cast)
    )
    wide = int(wider * text)
    yield MemoryPeak("feed-forward of the text", 2 * width + 4 * image + 3 * text + wide + max(wide, cast))


def _attention(call: TokenLoad, held: int, part: int) -> Iterator[MemoryPeak]:
    """Yields the moments of attention. `held`: bytes alive, with this rank's queries, keys, values; `part`: of one."""
    in_float = FP32 // call.element  # rotation and merging of partial results compute in float32
    yield MemoryPeak("rotation", held + part + 3 * in_float * part)
    if call.ulysses == 1:
        yield MemoryPeak("attention", held + part, _ring(call, part) - part)
        return
    mine = call.width(call.group) // call.tensor // call.ulysses  # all tokens of the group, this rank's heads
    yield MemoryPeak("exchange of tokens for heads", held, 3 * part + 3 * mine)
    yield MemoryPeak("attention", held + part, 3 * mine + _ring(call, mine) - part)
    reordered = mine if call.rows > 1 else 0  # a single row is already in the order in which it is sent
    yield MemoryPeak("exchange of heads for tokens", held + part, 3 * mine + mine + reordered + part)


def _ring(call: TokenLoad, queries: int) -> int:
    """Returns the bytes of attention's output, of the keys and values in a ring, and of merging its partial results."""
    if len(call.keys) == 1:
        return queries
    shares = min(3, len(call.keys))  # its own, the one in use, the one that is arriving
    pair = 2 * call.width(max(call.keys)) // call.tensor // call.ulysses
    merging = (4 * (FP32 // call.element) + 1) * queries
    return shares * pair + merging
