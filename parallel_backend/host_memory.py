"""The host memory that this process may use, limited by the computer and by control groups; also drops mapped pages of
files from this process."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
from collections.abc import Iterator
from pathlib import Path


def host_memory(cgroups: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")) -> int:
    """Returns the limit in bytes. `cgroups`: mount point of the control groups; `membership`: file that names this
    process's."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for file in _limit_files(cgroups, membership):
        with contextlib.suppress(OSError, ValueError):  # no such file, or `max`
            limits.append(int(file.read_text()))
    return min(limits)


def _limit_files(cgroups: Path, membership: Path) -> Iterator[Path]:
    """Lists the limit files of this process's groups and of all groups around them, as the limits of all apply. The
    mount itself is included: a container often sees its own group there, under another path than the kernel names."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        lines = []
    paths = {"": "/", "memory": "/"}
    for line in lines:
        _, controllers, path = line.split(":", 2)
        for controller in {"", "memory"} & set(controllers.split(",")):
            paths[controller] = path
    for mount, path, name in (
        (cgroups, paths[""], "memory.max"),
        (cgroups / "memory", paths["memory"], "memory.limit_in_bytes"),
    ):
        group = mount / path.lstrip("/")
        yield from (folder / name for folder in (group, *group.parents) if folder.is_relative_to(mount))


def available_memory(
    total: int, *, meminfo: Path = Path("/proc/meminfo"), cgroup: Path = Path("/sys/fs/cgroup")
) -> int:
    """Returns the bytes available without swapping; in a container at most what its limit `total` leaves."""
    found = _numbers(meminfo, ":").get("MemAvailable", 0) * 1024
    try:
        used = int((cgroup / "memory.current").read_text())
    except (OSError, ValueError):  # not in a container, or version 1 control groups
        return found
    cached = _numbers(cgroup / "memory.stat", " ").get("file", 0)  # the kernel frees it on demand
    return min(found, max(0, total - used + cached))


def give_back_pages(path: str, smaps: Path = Path("/proc/self/smaps")) -> None:
    """Drops the pages of the mapped file at `path` from this process. They stay in the page cache and are mapped again
    at the next read. A mapping that was written to keeps its pages, because the file does not have their data."""
    try:
        lines = smaps.read_text().splitlines()
    except OSError:  # not Linux
        return
    libc, where = ctypes.CDLL(None, use_errno=True), ""
    for line in lines:
        name, *rest = line.split()
        if not name.endswith(":"):  # "7f00-7f10 r--p 0 08:01 1234  /the/file"
            where = name if line.endswith(f" {path}") else ""
        elif where and name == "Anonymous:" and rest[0] == "0":
            begin, end = (int(address, 16) for address in where.split("-"))
            libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), mmap.MADV_DONTNEED)


def _numbers(table: Path, separator: str) -> dict[str, int]:
    """Returns the first number of each line, by the name at the line's start."""
    found = {}
    try:
        for line in table.read_text().splitlines():
            name, _, rest = line.partition(separator)
            if (words := rest.split()) and words[0].isdigit():
                found[name] = int(words[0])
    except OSError:
        pass
    return found
