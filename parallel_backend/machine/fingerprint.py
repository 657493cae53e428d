"""The machine and the software that a measurement belongs to: a digest that changes when a time could."""

from __future__ import annotations

import functools
import hashlib
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from .topology import Topology

PACKAGES = ("torch", "diffusers", "xfuser", "flash-attn", "flash_attn_3", "sageattention", "triton")
# What a person can set that changes how fast the ranks are.
VARIABLES = (
    "OMP_NUM_THREADS",
    "NCCL_P2P_DISABLE",
    "NCCL_P2P_LEVEL",
    "NCCL_SHM_DISABLE",
)
_LENGTH = 16  # hex digits: 64 bits tell a user's machines apart


@dataclass(frozen=True)
class Fingerprint:
    """`hardware`, `software`: lines that a person may read, with nothing that names a person or a machine."""

    hardware: tuple[str, ...]
    software: tuple[str, ...]

    @property
    def digest(self) -> str:
        return hashed(*self.hardware, "--", *self.software)


def take_fingerprint(
    topology: Topology, environ: Mapping[str, str] = os.environ, cpu: Sequence[str] | None = None
) -> Fingerprint:
    """This machine's, from its devices (`topology`), the installed packages and the environment.

    `cpu`: lines that stand for the processor, for tests; it counts only where ranks compute on it.
    """
    from ..wire.protocol import VERSION  # with torch, which the doctor may find missing

    # A GPU's UUID is its serial number, so only its digest is kept.
    hardware = tuple(
        f"{d.name}, {d.memory >> 20} MiB, {hashed(d.uuid)}, PCIe {d.pcie:g} GB/s" for d in topology.devices
    )
    if not hardware:
        hardware = tuple(cpu if cpu is not None else (f"{cpu_name()}, {cores()} cores",))
    software = [
        f"protocol {VERSION}",
        f"python {platform.python_version()}",
        f"driver {topology.driver or 'none'}",
    ]
    software += [f"{name} {found}" for name in PACKAGES if (found := installed_version(name))]
    software += [f"{name}={environ[name]}" for name in VARIABLES if environ.get(name)]
    return Fingerprint(hardware, tuple(software))


@functools.cache
def installed_version(package: str) -> str:
    """The version of an installed package, without importing it; empty where it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def cpu_name(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The processor's name as the kernel writes it."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def device_ids(devices: Sequence[str], topology: Topology) -> tuple[str, ...]:
    """Names that tell the devices of a group apart from others: UUIDs of GPUs, where known, else their names.

    `devices`: names in rank order, such as cuda:1; `topology`: what this process can see (Topology.visible).
    """
    uuids = {f"cuda:{i}": device.uuid for i, device in enumerate(topology.devices)}
    return tuple(uuids.get(name, name) for name in devices)


def device_key(uuids: Sequence[str]) -> str:
    """Stands for these devices in this order, without telling which they are."""
    return hashed(*uuids)


def hashed(*parts: str) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:_LENGTH]
