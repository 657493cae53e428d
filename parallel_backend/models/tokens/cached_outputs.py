"""The outputs of a module's blocks that a step cache stores. Pure data, without torch and without comfy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...requests import STAY
from .regions import LAST_BLOCK, Blocks, Region, Tokens
from .table import entry_of

_TEXT = "txt"


@dataclass(frozen=True)
class CachedOutput:
    """Output number `index` of the first block, to which the other blocks add. `tokens`: how it is sharded, None if it
    is whole on every rank (sound); `at_end`: True if the last block returns it at the same index, else the module after
    the blocks takes it; `decides`: its change helps to decide if the other blocks run."""

    index: int
    tokens: Tokens | None
    at_end: bool
    decides: bool = True


def main_region(regions: Sequence[Region]) -> Region | None:
    """Returns the region that a step cache can skip except for its first block. Refiners before it always run."""
    return regions[-1] if regions and regions[-1].leave is not None else None


def cached_outputs(region: Region, first: Blocks, last: Blocks) -> tuple[CachedOutput, ...]:
    """Returns the outputs to cache of a region from `first` to `last`; none if these blocks give different outputs."""
    given = [_given(first, name) for name in first.gives]
    if region.leave == LAST_BLOCK:
        if first.gives != last.gives:
            return ()
        return tuple(
            CachedOutput(index, tokens, at_end=True, decides=tokens is None or tokens.stream != _TEXT)
            for index, tokens in enumerate(given)
        )
    leaves = region.leaves.stream if isinstance(region.leaves, Tokens) else region.leaves
    main = [index for index, tokens in enumerate(given) if tokens is not None and tokens.stream == leaves]
    if not main:
        return ()
    beside = [index for index, tokens in enumerate(given) if tokens is None and first is last]
    return (
        CachedOutput(main[0], given[main[0]], at_end=False),
        *(CachedOutput(index, None, at_end=True) for index in beside),
    )


def why_not_reused(class_name: str, mode: str) -> str:
    """Returns why a step cache cannot be used for a class, in a user's words, or "". `mode`: the first of
    requests.TOKEN_MODES that is proven for the class in this ComfyUI."""
    entry = entry_of(class_name)
    if entry is None or entry.bands:
        return f"which parts of {class_name} are its blocks is not described"
    if mode != STAY:  # code between blocks may reorder tokens
        return f"in this version of ComfyUI, {class_name} computes in another way than the pack knows"
    region = main_region(entry.regions)
    kinds = [] if region is None else list(region.lists.values())
    if region is None or not cached_outputs(region, kinds[0], kinds[-1]):
        return f"the pack does not know what {class_name} gives if blocks are left out"
    return ""


def _given(kind: Blocks, name: str | int | None) -> Tokens | None:
    argument = None if name is None else kind.arguments[name]
    return argument if isinstance(argument, Tokens) else None
