"""Binding of a rank to the CPU cores near its GPU: launches, staging buffers and gloo's messages cross no socket.

Linux lists in sysfs the NUMA node of each PCI device and the cores of each node. (torch.numa does this for processes
that torchrun starts.)
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

SYS = Path("/sys")


def stay_near(device: torch.device, sys_root: Path = SYS) -> None:
    """Restricts this thread, and threads that it starts, to those of its allowed cores that are near `device`.

    Changes nothing for a CPU, if sysfs names no node (a single node, a virtual machine), or if none of those cores is
    allowed for this process.
    """
    if device.type != "cuda":
        return
    card: Any = torch.cuda.get_device_properties(device)
    if (bus := getattr(card, "pci_bus_id", None)) is None:  # torch before 2.8 does not tell it
        return
    address = f"{card.pci_domain_id:04x}:{bus:02x}:{card.pci_device_id:02x}.0"
    allowed = os.sched_getaffinity(0)
    near = cores_near(address, sys_root) & allowed
    if near and near != allowed:
        os.sched_setaffinity(0, near)


def cores_near(address: str, sys_root: Path) -> set[int]:
    """Returns the cores of the NUMA node of the PCI device at `address` (0000:3b:00.0); empty if sysfs has none."""
    try:
        node = int((sys_root / "bus/pci/devices" / address / "numa_node").read_text())
        text = (sys_root / f"devices/system/node/node{node}/cpulist").read_text()
        return parse_cores(text)
    except (OSError, ValueError):  # the node is -1 if the firmware names none
        return set()


def parse_cores(text: str) -> set[int]:
    """Parses the kernel's lists of cores, such as 0-3,8,10-11. Raises ValueError for anything else."""
    cores: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cores |= set(range(int(first), int(last or first) + 1))
    return cores
