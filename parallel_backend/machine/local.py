"""The devices of this computer that a plan may use, and their best order for ranks."""

from __future__ import annotations

from dataclasses import dataclass

from ..devices import is_cpu
from .fingerprint import device_ids
from .probe import visible_topology
from .topology import PATHS, Topology

# ComfyUI's flags for little memory. Mode auto then shards the weights over the devices, or also offloads them to host
# memory.
LOWVRAM, NOVRAM = "--lowvram", "--novram"


@dataclass(frozen=True)
class LocalMachine:
    """The selected devices. `devices`: names, one per rank in rank order; `failing`: selected devices that are left out
    because ranks failed there; `memory_flag`: LOWVRAM, NOVRAM or empty: makes mode auto save memory from the start."""

    devices: tuple[str, ...]
    failing: tuple[str, ...] = ()
    memory_flag: str = ""


def topology_of(devices: tuple[str, ...], visible: Topology) -> Topology:
    """Returns the topology of those of these devices that are among `visible`."""
    if is_cpu(devices):
        return Topology((), source="none")
    known = {device.uuid for device in visible.devices}
    return visible.select([uuid for uuid in device_ids(devices, visible) if uuid in known])


def order_devices(devices: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the devices with well-connected ones next to each other, because neighbouring ranks exchange the most."""
    if is_cpu(devices) or len(devices) < 3:
        return devices
    visible = visible_topology()
    uuids = device_ids(devices, visible)
    if not set(uuids) <= {device.uuid for device in visible.devices}:
        return devices
    names = dict(zip(uuids, devices, strict=True))
    return tuple(names[uuid] for uuid in neighbours_first(visible.select(uuids)))


def neighbours_first(topology: Topology) -> tuple[str, ...]:
    """Returns the UUIDs in an order in which well-connected devices follow each other."""
    left = [d.uuid for d in topology.devices]
    order: list[str] = []
    while left:
        first, *others = left
        pairs = {u: topology.pair(first, u) for u in others}
        nearness = {u: (pair.rate, -PATHS.index(pair.path)) for u, pair in pairs.items()}
        nearest = [u for u in others if nearness[u] == max(nearness.values())]
        order += [first, *nearest]
        left = [u for u in others if u not in nearest]
    return tuple(order)


def largest_joinable_count(topology: Topology, count: int) -> int:
    """Returns how many of the first `count` devices of `topology` NCCL can join: at most one MIG slice of each GPU."""
    parents: set[str] = set()
    for number, device in enumerate(topology.devices[:count]):
        if device.is_mig and device.parent in parents:
            return number
        parents.add(device.parent)
    return count
