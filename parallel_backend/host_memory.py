"""The host memory that this process may use: the computer's, or what its control group and those around it leave; and
pages of files that it gives back."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

_UNLIMITED = 2**60  # bytes; a control group of version 1 without a limit says something larger


def host_memory(cgroups: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> int:
    """Bytes. `cgroups`: where the control groups are mounted; `own`: the file that names those of this process."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([total, *_limits(cgroups, own)])


def _limits(cgroups: Path, own: Path) -> Iterator[int]:
    for file in _limit_files(cgroups, own):
        try:
            limit = int(file.read_text())
        except (OSError, ValueError):  # none there, or `max`
            continue
        if limit < _UNLIMITED:
            yield limit


def _limit_files(cgroups: Path, own: Path) -> Iterator[Path]:
    """A limit of a group holds for all groups inside it. A container often sees its own group as the mount itself,
    under whatever path the kernel names, so that the mount is looked at in any case."""
    try:
        lines = own.read_text().splitlines()
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
    """Bytes that could be had without swapping; within a container no more than what its limit `total` leaves."""
    found = _numbers(meminfo, ":").get("MemAvailable", 0) * 1024
    try:
        used = int((cgroup / "memory.current").read_text())
    except (OSError, ValueError):  # not in a container, or an older kind of limit
        return found
    cached = _numbers(cgroup / "memory.stat", " ").get("file", 0)  # given back when it is needed
    return min(found, max(0, total - used + cached))


def give_back_pages(path: str, smaps: Path = Path("/proc/self/smaps")) -> None:
    """Takes the pages of the file at `path` out of this process, which maps it: they stay in the page cache, and come
    back when something reads them. A mapping that was written to keeps its pages, which the file has not."""
    try:
        lines = smaps.read_text().splitlines()
    except OSError:  # no Linux
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
    """The first number of each line, by the line's name."""
    found = {}
    try:
        for line in table.read_text().splitlines():
            name, _, rest = line.partition(separator)
            if (words := rest.split()) and words[0].isdigit():
                found[name] = int(words[0])
    except OSError:
        pass
    return found
