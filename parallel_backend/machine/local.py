"""The devices of this computer that a plan may use, and the order in which ranks should sit on them."""

from __future__ import annotations

from dataclasses import dataclass

from ..devices import is_cpu
from .fingerprint import device_ids
from .probe import visible_topology
from .topology import PATHS, Topology

# ComfyUI's flags for little memory, and what `auto` makes of them: weights shared out over the devices, or in the
# computer's memory as well.
LOWVRAM, NOVRAM = "--lowvram", "--novram"
NO_GPUS = Topology((), source="none")


@dataclass(frozen=True)
class LocalMachine:
    """`devices`: by name, one per rank in rank order; `failing`: selected too, and left out because ranks failed there;
    `memory_flag`: one of ComfyUI's that asks `auto` to save devices' memory before time, or empty."""

    devices: tuple[str, ...]
    failing: tuple[str, ...] = ()
    memory_flag: str = ""

    @property
    def on_cpu(self) -> bool:
        return is_cpu(self.devices)


def topology_of(devices: tuple[str, ...], visible: Topology) -> Topology:
    """Of these devices alone, as far as this process can see them."""
    if is_cpu(devices):
        return NO_GPUS
    known = {device.uuid for device in visible.devices}
    return visible.select([uuid for uuid in device_ids(devices, visible) if uuid in known])


def order_devices(devices: tuple[str, ...]) -> tuple[str, ...]:
    """The same devices with well-joined ones next to each other, where ranks exchange most."""
    if is_cpu(devices) or len(devices) < 3:
        return devices
    visible = visible_topology()
    uuids = device_ids(devices, visible)
    if not set(uuids) <= {device.uuid for device in visible.devices}:
        return devices
    names = dict(zip(uuids, devices, strict=True))
    return tuple(names[uuid] for uuid in neighbours_first(visible.select(uuids)))


def neighbours_first(topology: Topology) -> tuple[str, ...]:
    """UUIDs ordered so that well-joined devices follow each other: the order in which ranks should sit on them."""
    left = [d.uuid for d in topology.devices]
    order: list[str] = []
    while left:
        block = [left.pop(0)]
        best = max((topology.pair(block[0], u).rate for u in left), default=0.0)
        paths = [PATHS.index(topology.pair(block[0], u).path) for u in left]
        nearest = min(paths, default=0)
        for u in list(left):
            pair = topology.pair(block[0], u)
            if pair.rate == best and PATHS.index(pair.path) == nearest:
                block.append(u)
                left.remove(u)
        order += block
    return tuple(order)


def largest_joinable_count(topology: Topology, count: int) -> int:
    """How many of the first `count` devices NCCL can join: at most one MIG slice of each GPU. `topology`: of these."""
    parents: set[str] = set()
    for number, device in enumerate(topology.devices[:count]):
        if device.is_mig and device.parent in parents:
            return number
        parents.add(device.parent)
    return count
