"""Files that this process maps: which tensors are views of them, and how much of them is in memory."""

from __future__ import annotations

from pathlib import Path

import psutil
from torch import Tensor


def mapped_ranges(path: Path | str) -> list[tuple[int, int]]:
    """Returns the address ranges of this process that map the file."""
    ranges = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        if line.endswith(str(path)):
            begin, end = line.split()[0].split("-")
            ranges.append((int(begin, 16), int(end, 16)))
    return ranges


def is_mapped(path: Path | str, tensor: Tensor) -> bool:
    """Returns True if a tensor's numbers are where this process maps the file."""
    return any(begin <= tensor.data_ptr() < end for begin, end in mapped_ranges(path))


def resident_bytes(path: Path | str) -> int:
    """Returns the bytes of the file's pages that this process has in memory now."""
    return sum(part.rss for part in psutil.Process().memory_maps() if part.path == str(path))
