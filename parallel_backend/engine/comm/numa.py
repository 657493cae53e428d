"""Keeps a rank on the CPU cores near its GPU, so that launches, staging buffers and gloo's messages cross no socket.

Linux says in sysfs which NUMA node a PCI device hangs on and which cores that node has. (torch.numa does it for
processes that torchrun starts.)
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

SYS = Path("/sys")


def stay_near(device: torch.device, sys_root: Path = SYS) -> None:
    """Restricts this thread, and those that it starts, to the cores near `device` that it may use.

    Nothing changes on a CPU, where sysfs says nothing (one node, a virtual machine), and where none of those cores is
    this process's to use.
    """
    if device.type != "cuda":
        return
    address = _address(torch.cuda.get_device_properties(device))
    allowed = os.sched_getaffinity(0)
    near = (cores_near(address, sys_root) if address else set()) & allowed
    if near and near != allowed:
        os.sched_setaffinity(0, near)


def cores_near(address: str, sys_root: Path) -> set[int]:
    """The CPU cores of the NUMA node of the PCI device at `address` (0000:3b:00.0); empty where nobody says."""
    try:
        node = int((sys_root / "bus/pci/devices" / address / "numa_node").read_text())
        text = (sys_root / f"devices/system/node/node{node}/cpulist").read_text()
        return parse_cores(text)
    except (OSError, ValueError):  # -1 where the firmware says nothing: there is no such node
        return set()


def parse_cores(text: str) -> set[int]:
    """0-3,8,10-11 as the kernel writes lists of cores. Raises ValueError for anything else."""
    cores: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cores |= set(range(int(first), int(last or first) + 1))
    return cores


def _address(card: Any) -> str | None:
    """sysfs's name of a GPU; None with a torch that does not tell (before 2.8)."""
    bus = getattr(card, "pci_bus_id", None)
    if bus is None:
        return None
    return f"{card.pci_domain_id:04x}:{bus:02x}:{card.pci_device_id:02x}.0"
