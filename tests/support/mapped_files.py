"""Where files lie in this process's memory."""

from __future__ import annotations

from pathlib import Path


def mapped_ranges(path: Path) -> list[tuple[int, int]]:
    """Address ranges of this process that are pages of the file."""
    ranges = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        if line.endswith(str(path)):
            begin, end = line.split()[0].split("-")
            ranges.append((int(begin, 16), int(end, 16)))
    return ranges
