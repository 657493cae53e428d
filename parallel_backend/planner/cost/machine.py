"""This machine as the cost model knows it: which card and which link decide, from the devices and their paths."""

from __future__ import annotations

from dataclasses import replace

from ...errors import RequestError
from ..machine.cards import Card, Domain, Interconnect, find_card
from ..machine.topology import PATHS, Topology
from .model import USABLE_MEMORY, Machine

# A socket's links to the other, nominal GB/s one way: about two or three UPI or xGMI links of 20 GB/s.
SOCKET_LINK = 32.0
# PCIe 4.0 x16, where NVML does not say.
USUAL_PCIE = 32.0


def model_machine(topology: Topology) -> tuple[Machine, tuple[str, ...]]:
    """(machine, notes) for equal shares over all devices. Raises RequestError where there is nothing to model.

    With cards that differ, the slowest decides the time and the smallest the memory.
    """
    if not topology.devices:
        raise RequestError(
            "There is no GPU here, and the CPU has no data sheet: only a measurement can tell."
        )
    cards, notes = [], []
    for device in topology.devices:
        card = find_card(device.name.split(" MIG ")[0])
        if device.is_mig:
            # A slice has its share of the memory and about the same share of everything else.
            part = device.memory / (card.memory * 1e9)
            card = replace(card, tflops=card.tflops * part, bandwidth=card.bandwidth * part)
        cards.append(card)
    slowest = min(cards, key=lambda c: c.tflops)
    if topology.mixed:
        names = ", ".join(sorted({d.name for d in topology.devices}))
        notes.append(f"The cards differ ({names}): with an even split all wait for the {slowest.name}.")
    memory = min(d.memory for d in topology.devices) * USABLE_MEMORY
    count = _joinable(topology)
    if count < len(topology.devices):
        notes.append(
            f"Slices of one GPU cannot work together (NCCL does not join them), so {count} of the "
            f"{len(topology.devices)} can be used; list one slice per GPU first."
        )
    return Machine(slowest, link_of(topology, slowest), count, memory), tuple(notes)


def _joinable(topology: Topology) -> int:
    """The number of devices, from the first on, that NCCL can join: at most one slice of each GPU."""
    parents: set[str] = set()
    for count, device in enumerate(topology.devices):
        if device.is_mig and device.parent in parents:
            return count
        parents.add(device.parent)
    return len(topology.devices)


def link_of(topology: Topology, card: Card) -> Interconnect:
    """The link that the paths between the devices amount to, ranks in the devices' order."""
    pairs = [pair for _, _, pair in topology.pairs]
    pcie = min((d.pcie for d in topology.devices if d.pcie), default=USUAL_PCIE)
    if not pairs:
        return Interconnect("one device", "pcie", pcie)
    if all(p.path == "NVSWITCH" for p in pairs) or all(p.path == "NVLINK" for p in pairs):
        rate = min(p.rate for p in pairs)
        return Interconnect(f"{topology.kind} {rate:.0f} GB/s", "nvlink", rate)
    if any(p.path in ("NVSWITCH", "NVLINK") for p in pairs):
        size = _domain(topology, "NVLINK")
        rate = max(p.rate for p in pairs)
        if size > 1:
            outside = Domain(size, pcie, crossing=True)
            return Interconnect(f"NVLink in groups of {size}, else PCIe", "nvlink", rate, (outside,))
    if any(p.peer is False for p in pairs):
        return Interconnect(
            f"PCIe {pcie:.0f} GB/s without peer access", "host", pcie, (), host_total=4 * pcie
        )
    domains = []
    if (size := _domain(topology, "PXB")) > 1:
        domains.append(Domain(size, pcie))
    if 1 < (size := _domain(topology, "NODE")) < len(topology.devices):
        domains.append(Domain(size, SOCKET_LINK, crossing=True))
    elif topology.kind == "SYS" and size == 1:
        domains.append(Domain(1, SOCKET_LINK, crossing=True))
    return Interconnect(f"PCIe {pcie:.0f} GB/s ({topology.kind})", "pcie", pcie, tuple(domains))


def _domain(topology: Topology, at_least: str) -> int:
    """Size of the equal groups of neighbouring devices whose paths are at least this good; 1 where there are none."""
    devices = topology.devices
    limit = PATHS.index(at_least)
    for size in range(len(devices), 1, -1):
        if len(devices) % size:
            continue
        groups = [devices[i : i + size] for i in range(0, len(devices), size)]
        if all(
            PATHS.index(topology.pair(a.uuid, b.uuid).path) <= limit
            for group in groups
            for k, a in enumerate(group)
            for b in group[k + 1 :]
        ):
            return size
    return 1
