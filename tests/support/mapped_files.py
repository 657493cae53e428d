"""Address ranges and resident bytes of files that this process maps."""

from __future__ import annotations

from pathlib import Path


def mapped_ranges(path: Path) -> list[tuple[int, int]]:
    """Returns the address ranges of this process that map the file."""
    ranges = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        if line.endswith(str(path)):
            begin, end = line.split()[0].split("-")
            ranges.append((int(begin, 16), int(end, 16)))
    return ranges


def resident_bytes(path: Path | str) -> int:
    """Returns the bytes of the file's pages that this process has in memory now (Rss)."""
    found, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, *values = line.split()
        if not name.endswith(":"):
            inside = line.endswith(str(path))
        elif inside and name == "Rss:":
            found += int(values[0]) * 1024
    return found
