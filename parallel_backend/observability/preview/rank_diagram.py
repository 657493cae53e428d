"""The rank diagram in Strategy Selector: each device's part of the work, in words. Pure functions."""

from __future__ import annotations

from collections.abc import Iterator

from ...layout import RankCoordinates, slice_of, split_sizes
from ...models.model_file import ModelFile
from ...strategy import ParallelStrategy
from ..panel import Shown

PROMPTS = ("prompt", "negative prompt")


def assign_devices(
    strategy: ParallelStrategy,
    devices: tuple[str, ...],
    file: ModelFile,
    *,
    images: int = 0,
    prompts: int = 0,
) -> list[Shown]:
    """Returns {"device", "rank": None if it is idle, "roles": [{"axis", "text"}] with the slowest axis first, "text"}
    for each of `devices`, those in use first: device i is rank i. "text": e.g. `cuda:0 · prompt · heads 1/3`.

    `images`, `prompts` (2 with CFG): of the request; 0 for as many as the strategy splits.
    """
    images, prompts = images or strategy.data_degree, prompts or strategy.cfg_degree
    shown: list[Shown] = []
    for rank, device in enumerate(devices):
        is_idle = rank >= strategy.world_size
        roles = [("idle", "idle")] if is_idle else list(_roles(strategy, rank, file, images, prompts))
        shown.append(
            {
                "device": device,
                "rank": None if is_idle else rank,
                "roles": [{"axis": axis, "text": text} for axis, text in roles],
                "text": " · ".join([device, *(text for _, text in roles)]),
            }
        )
    return shown


def _roles(
    strategy: ParallelStrategy, rank: int, file: ModelFile, images: int, prompts: int
) -> Iterator[tuple[str, str]]:
    """Yields (axis, its text). The axes are rows (data and cfg), pipefusion, ring, ulysses, tensor and share."""
    place = RankCoordinates.of(strategy, rank)
    if strategy.row_degree > 1:
        yield "rows", _rows(strategy, place, images, prompts)
    if strategy.pipefusion_degree > 1:
        blocks = place.blocks(strategy, file.shape.blocks)
        of = f"{len(blocks)} of {file.shape.blocks} blocks"
        yield "pipefusion", f"stage {place.stage + 1} of {strategy.pipefusion_degree}, {of}"
    heads = "heads" if file.shape.splits_tokens else "queries"
    if bands := file.shape.band_rows > 0:
        heads = "band"
    for axis, index, degree, what in (
        ("ring", place.ring, strategy.ring_degree, heads if bands else "ring"),
        ("ulysses", place.ulysses, strategy.ulysses_degree, heads),
        ("tensor", place.tensor, strategy.tensor_degree, "tensor"),
    ):
        if degree > 1:
            yield axis, f"{what} {index + 1}/{degree}"
    if strategy.device_shares and strategy.sequence_degree > 1:
        tenths = place.split_tokens(strategy, 1000)[place.ring * strategy.ulysses_degree + place.ulysses]
        yield "share", f"{tenths / 10:.0f} % of the tokens"


def _rows(strategy: ParallelStrategy, place: RankCoordinates, images: int, prompts: int) -> str:
    """Describes a rank's contiguous share of the rows: all images of the positive prompt, then of the negative one."""
    part = slice_of(split_sizes(images * prompts, strategy.row_degree), place.row(strategy))
    found = []
    for prompt in range(prompts):
        first, last = max(part.start, prompt * images), min(part.stop, (prompt + 1) * images)
        if first < last:
            found.append(_images(first - prompt * images, last - prompt * images, images, prompt, prompts))
    return " + ".join(found) or "no image"


def _images(first: int, stop: int, images: int, prompt: int, prompts: int) -> str:
    """Describes images [first, stop) of a prompt."""
    words = [PROMPTS[prompt]] if prompts == len(PROMPTS) else []
    if stop - first < images or not words:
        numbers = f"image {first + 1}" if stop - first == 1 else f"images {first + 1} to {stop}"
        words.append(f"{numbers} of {images}")
    return ", ".join(words)
