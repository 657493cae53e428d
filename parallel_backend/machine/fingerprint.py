"""The machine and the software that a measurement belongs to, as a digest that changes if the speed could change."""

from __future__ import annotations

import functools
import hashlib
import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from .topology import Topology

PACKAGES = ("torch", "diffusers", "xfuser", "flash-attn", "flash_attn_3", "sageattention", "triton")
# Environment variables that change the speed of ranks.
VARIABLES = (
    "OMP_NUM_THREADS",
    "NCCL_P2P_DISABLE",
    "NCCL_P2P_LEVEL",
    "NCCL_SHM_DISABLE",
)
_LENGTH = 16  # hex digits: 64 bits are enough to distinguish a user's machines


@dataclass(frozen=True)
class Fingerprint:
    """A machine and its software. `hardware`, `software`: readable lines without names of people or machines."""

    hardware: tuple[str, ...]
    software: tuple[str, ...]

    @property
    def digest(self) -> str:
        return hashed(*self.hardware, "--", *self.software)


def take_fingerprint(topology: Topology) -> Fingerprint:
    """Returns the fingerprint of this machine, from its devices (`topology`), the packages and the environment. The
    processor is only included if there is no GPU."""
    from ..wire.protocol import VERSION  # imports torch, which may be missing when the doctor runs

    # A GPU's UUID is its serial number, so only its digest is kept.
    hardware = tuple(
        f"{d.name}, {d.memory >> 20} MiB, {hashed(d.uuid)}, PCIe {d.pcie:g} GB/s" for d in topology.devices
    )
    if not hardware:
        hardware = (f"{cpu_name()}, {cores()} cores",)
    software = [
        f"protocol {VERSION}",
        f"python {platform.python_version()}",
        f"driver {topology.driver or 'none'}",
    ]
    software += [f"{name} {found}" for name in PACKAGES if (found := installed_version(name))]
    software += [f"{name}={os.environ[name]}" for name in VARIABLES if os.environ.get(name)]
    return Fingerprint(hardware, tuple(software))


@functools.cache
def installed_version(package: str) -> str:
    """Returns the version of a package without importing it; empty if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


@functools.cache
def cpu_name(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Returns the processor's name from /proc/cpuinfo, or its architecture if that has none."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def cores() -> int:
    """Returns the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def device_ids(devices: Sequence[str], topology: Topology) -> tuple[str, ...]:
    """Returns an id for each device: the UUID of a GPU if known, else its name.

    `devices`: names in rank order, such as cuda:1; `topology`: the devices that this process sees (Topology.visible).
    """
    known = topology.by_name
    return tuple(known[name].uuid if name in known else name for name in devices)


def device_key(uuids: Sequence[str]) -> str:
    """Returns a digest of these devices in this order, from which their UUIDs cannot be read."""
    return hashed(*uuids)


def hashed(*parts: str) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:_LENGTH]
