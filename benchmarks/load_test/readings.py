"""What the numbers of a run say: percentiles, and what a ComfyUI or a rank has more at the end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

from adversaries.soak import MIB, Usage, growth


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of them do not exceed (nearest rank); 0.0 of none."""
    ordered = sorted(values)
    return ordered[max(0, -(-len(ordered) * round(share * 100) // 100) - 1)] if ordered else 0.0


def grown_mib(seen: Mapping[str, Sequence[Usage]]) -> float:
    """MiB that all processes together have more in the last third of their readings than in the middle one."""
    total = 0.0
    for usages in seen.values():
        third = len(usages) // 3
        middle, last = usages[third : 2 * third], usages[-third:]
        if third:
            total += median(one.memory for one in last) - median(one.memory for one in middle)
    return total / MIB


def leaks(seen: Mapping[str, Sequence[Usage]]) -> list[str]:
    """The memory and the descriptors that did not level off, in words (adversaries.soak.growth). Threads do so late:
    ComfyUI's server starts a few of its own whenever more routes than before are asked at once."""
    found = [(name, words) for name, usages in seen.items() for words in growth(list(usages))]
    return [f"{name}: {words}" for name, words in found if not words.startswith("threads")]
