"""The GPUs of a machine and the path between each pair, as frozen dataclasses; probe.py reads them from the drivers.

Devices are matched by UUID, so that neither the order nor the spelling of CUDA_VISIBLE_DEVICES matters.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

from ..errors import DeviceError

# Paths as `nvidia-smi topo -m` writes them, best first.
PATHS = ("NVSWITCH", "NVLINK", "same board", "PIX", "PXB", "PHB", "NODE", "SYS", "MIG", "unknown")


@dataclass(frozen=True)
class Device:
    """One GPU or MIG slice. `memory`: bytes; `capability`: CUDA's, (0, 0) if unknown; `pcie`: GB/s one way, nominal.

    `index`: place in NVML's order (by PCI bus); `parent`: for a MIG slice, the UUID of its GPU; `exclusive`: True if
    its compute mode admits only one process.
    """

    index: int
    uuid: str
    name: str
    memory: int
    capability: tuple[int, int] = (0, 0)
    bus: str = ""
    numa: int | None = None
    pcie: float = 0.0
    parent: str = ""
    exclusive: bool = False

    @property
    def is_mig(self) -> bool:
        return bool(self.parent)


@dataclass(frozen=True)
class Pair:
    """The path between two devices. `path`: NVLINK, NVSWITCH, or how PCIe joins them (PIX, PXB, PHB, NODE, SYS), MIG.

    `peer`: True if one can read the other's memory, None if unknown; `rate`: GB/s one way, nominal.
    """

    path: str
    peer: bool | None
    rate: float


@dataclass(frozen=True)
class Topology:
    """All devices and the path of each pair (by UUIDs, in the devices' order). `source`: nvml, torch or none."""

    devices: tuple[Device, ...]
    pairs: tuple[tuple[str, str, Pair], ...] = ()
    source: str = "nvml"
    driver: str = ""
    notes: tuple[str, ...] = ()

    @property
    def by_name(self) -> dict[str, Device]:
        """The devices by torch's names, cuda:0 and so on. These must be all that this process sees (`visible`)."""
        return {f"cuda:{i}": device for i, device in enumerate(self.devices)}

    def pair(self, a: str, b: str) -> Pair:
        """Returns the path between two UUIDs, in either order. Raises DeviceError if it is unknown."""
        for one, other, pair in self.pairs:
            if {one, other} == {a, b}:
                return pair
        raise DeviceError(f"No path is known between {a} and {b}.")

    def select(self, uuids: Sequence[str]) -> Topology:
        """Returns the topology of these devices, in this order. Takes UUIDs with or without GPU-/MIG- in front, or an
        unambiguous beginning; raises DeviceError for others."""
        chosen = tuple(self._find(uuid) for uuid in uuids)
        pairs = tuple((a.uuid, b.uuid, self.pair(a.uuid, b.uuid)) for a, b in combinations(chosen, 2))
        return replace(self, devices=chosen, pairs=pairs)

    def visible(self, environ: Mapping[str, str] = os.environ) -> Topology:
        """Returns the devices that CUDA shows to a process with this environment, in CUDA's order.

        CUDA's default order puts the fastest device first and promises nothing for the rest. If the cards differ and
        CUDA_DEVICE_ORDER is not PCI_BUS_ID, a note says that the order is uncertain; `select` the UUIDs that torch
        reports instead. A topology from torch is returned unchanged: torch only sees visible devices.
        """
        if self.source == "torch":
            return self
        ordered, note = list(self.devices), ""
        if self.mixed and environ.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
            ordered.sort(key=lambda d: (d.capability, d.memory), reverse=True)
            note = (
                "The cards differ and CUDA orders them by speed, so numbers are a guess; set "
                "CUDA_DEVICE_ORDER=PCI_BUS_ID."
            )
        requested = environ.get("CUDA_VISIBLE_DEVICES")
        if requested is None:
            names = [d.uuid for d in ordered]
        else:
            names, note = _named(requested, ordered, note)
        chosen = self.select(names)
        return replace(chosen, notes=(*self.notes, *([note] if note else [])))

    def _find(self, uuid: str) -> Device:
        bare = _bare(uuid)
        found = [d for d in self.devices if bare and _bare(d.uuid).startswith(bare)]
        if len(found) != 1:
            known = ", ".join(d.uuid for d in self.devices) or "none"
            what = "is not among the devices" if not found else "fits several devices"
            raise DeviceError(f"UUID {uuid!r} {what} of this machine: {known}.")
        return found[0]

    @property
    def mixed(self) -> bool:
        """True if the devices differ in kind or memory (by more than 1 %: boards of one kind vary a little)."""
        if len({d.name for d in self.devices}) > 1:
            return True
        sizes = [d.memory for d in self.devices]
        return bool(sizes) and max(sizes) > 1.01 * min(sizes)

    @property
    def kind(self) -> str:
        """The slowest path, which limits sequence parallelism: a Pair.path, perhaps with "without peer access"."""
        if not self.devices:
            return "gloo on CPU"
        if len(self.devices) == 1:
            return "one device"
        slowest = min(
            (p for _, _, p in self.pairs), key=lambda p: (p.peer is not False, p.rate, -PATHS.index(p.path))
        )
        return slowest.path if slowest.peer is not False else f"{slowest.path} without peer access"

    def describe(self) -> str:
        """Returns one sentence for the user."""
        if not self.devices:
            return "No GPU: processes run on the CPU over gloo."
        counts = Counter(f"{d.name} ({d.memory / 2**30:.0f} GiB)" for d in self.devices)
        cards = " + ".join(f"{n} × {name}" for name, n in counts.items())
        if len(self.devices) == 1:
            return f"{cards}."
        sockets = len({d.numa for d in self.devices if d.numa is not None})
        where = f", over {sockets} NUMA nodes" if sockets > 1 else ""
        warning = "; the cards differ, so an even split waits for the slowest" if self.mixed else ""
        return f"{cards}, slowest path {self.kind}{where}{warning}."


def _bare(uuid: str) -> str:
    return uuid.lower().removeprefix("gpu-").removeprefix("mig-")


def _named(requested: str, ordered: list[Device], note: str) -> tuple[list[str], str]:
    """Returns the UUIDs in CUDA_VISIBLE_DEVICES; like CUDA, ignores everything from the first unknown entry on."""
    names: list[str] = []
    for entry in (part.strip() for part in requested.split(",")):
        if entry.isdigit():
            if int(entry) >= len(ordered):
                break
            found = [ordered[int(entry)]]
        else:
            found = [d for d in ordered if entry and d.uuid.lower().startswith(entry.lower())]
        if len(found) != 1 or found[0].uuid in names:
            break
        names.append(found[0].uuid)
    uncertain = any(part.strip().isdigit() for part in requested.split(","))
    return names, note if uncertain else ""
