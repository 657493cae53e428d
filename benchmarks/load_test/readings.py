"""Percentiles of a run's times, and growth of the memory and descriptors of ComfyUIs and ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

import numpy
from adversaries.soak import MIB, Usage, growth


def percentile(values: Sequence[float], share: float) -> float:
    """Returns the smallest value that at least `share` of them do not exceed (nearest rank); 0.0 without values."""
    return float(numpy.quantile(values, share, method="inverted_cdf")) if values else 0.0


def grown_mib(seen: Mapping[str, Sequence[Usage]]) -> float:
    """Returns the MiB by which all processes grew together from the middle third of their readings to the last one."""
    total = 0.0
    for usages in seen.values():
        third = len(usages) // 3
        middle, last = usages[third : 2 * third], usages[-third:]
        if third:
            total += median(one.memory for one in last) - median(one.memory for one in middle)
    return total / MIB


def leaks(seen: Mapping[str, Sequence[Usage]]) -> list[str]:
    """Returns in words the memory and descriptors that did not level off (adversaries.soak.growth). Threads level off
    late: ComfyUI's server starts a few whenever more routes than before are requested at once."""
    found = [(name, words) for name, usages in seen.items() for words in growth(list(usages))]
    return [f"{name}: {words}" for name, words in found if not words.startswith("threads")]
