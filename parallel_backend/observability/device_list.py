"""The devices that a person may choose, with name, memory and users, for the picker and the status panel."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from ..devices import MAX_CPU_RANKS, is_cpu, machine_of, memory_elsewhere, resolve_devices
from ..errors import DeviceError
from ..machine.fingerprint import cores
from ..machine.probe import visible_topology
from ..planner.workload.rank_memory import in_gib
from ..sidecar.cluster import head as clusters
from ..sidecar.process import device_lock
from ..sidecar.status import GroupStatus
from .gauges import read_gauges, running_processes
from .panel import AT_WORK, WARM, Shown, group_words

_SMALL = 64 * 2**20  # bytes: a program that uses less, such as a desktop, is not listed
NO_GPU = "No usable GPU. On the CPU you can see how it works; it will not be faster."


def local_devices(chosen: tuple[str, ...] = ()) -> tuple[str, ...]:
    """Returns every GPU; without a GPU one rank for each core of the CPU, and the CPU ranks in `chosen`."""
    found = resolve_devices("all")
    if not is_cpu(found):
        return found
    ranks = [int(device.removeprefix("cpu:")) + 1 for device in chosen if not machine_of(device)]
    return tuple(f"cpu:{rank}" for rank in range(max([min(MAX_CPU_RANKS, cores()), *ranks])))


def list_devices(
    devices: tuple[str, ...], groups: Iterable[GroupStatus], proc: Path = Path("/proc")
) -> list[Shown]:
    """Lists {"device", "name", "total_bytes", "free_bytes", "users": in words, "busy": True if it is in use now}."""
    groups = [group for group in groups if group.state in (*AT_WORK, *WARM)]
    read, running = read_gauges(devices), running_processes(devices)
    our_pids = {rank.pid for group in groups for rank in group.ranks} | {os.getpid()}
    listed: list[Shown] = []
    for device in devices:
        gauge = read.get(device)
        ours = [group for group in groups if device in group.devices]
        other = device_lock.holder_of(device)
        users = [f"processes of this ComfyUI: {group_words(group)}" for group in ours]
        users += [f"another ComfyUI ({other})"] if other else []
        users += [
            f"{_name_of(pid, proc)}: {in_gib(size)} GiB"
            for pid, size in sorted(running.get(device, {}).items(), key=lambda one: -one[1])
            if pid not in our_pids and size >= _SMALL
        ]
        listed.append(
            {
                "device": device,
                "name": gauge.name if gauge else "",
                "total_bytes": gauge.total_bytes if gauge else 0,
                "free_bytes": gauge.free_bytes if gauge else 0,
                "users": users,
                "busy": bool(other) or any(group.state in AT_WORK for group in ours),
            }
        )
    return listed


def list_clusters() -> list[Shown]:
    """Lists {"devices": the text that selects the cluster, "words", "there": True if a machine has joined}."""
    return [
        {"devices": f"cluster:{name}", "words": _cluster_words(devices), "there": bool(devices)}
        for name, devices in clusters.served().items()
    ]


def machine_words() -> str:
    """Returns a sentence on the GPUs of this machine and the links between them."""
    return NO_GPU if is_cpu(resolve_devices("all")) else visible_topology().describe()


def selected(text: str) -> tuple[str, ...]:
    """Returns the devices that `text` selects; empty if it is invalid."""
    try:
        return resolve_devices(text)
    except DeviceError:
        return ()


def _name_of(pid: int, proc: Path) -> str:
    try:
        return f"{(proc / str(pid) / 'comm').read_text().strip()} (process {pid})"
    except OSError:  # another user's process, or one outside this container
        return f"process {pid}"


def _cluster_words(devices: tuple[str, ...]) -> str:
    if not devices:
        return "no machine has joined yet"
    count, machines = len(devices), len({machine_of(device) for device in devices})
    words = f"{count} devices on one machine" if count > 1 else "one device on one machine"
    if machines > 1:
        words = f"{count} devices on {machines} machines"
    size = sum(map(memory_elsewhere, devices))
    return f"{words}, {in_gib(size)} GiB" if size else words
