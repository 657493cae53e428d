"""Verdicts about the machines of a cluster, as they said themselves when they joined."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ...devices import is_cpu, machine_of
from .report import Verdict

GROUP = "Machines"


def machines_of(devices: Sequence[str]) -> tuple[str, ...]:
    """CLUSTER/MACHINE of each, in the order of the devices; () for devices of this computer."""
    return tuple(dict.fromkeys(filter(None, map(machine_of, devices))))


def numbered(devices: Sequence[str]) -> dict[str, str]:
    """How a report that is shown to others calls the machines: a number for each name."""
    return {name: f"machine {number}" for number, name in enumerate(machines_of(devices), 1)}


def check_machines(devices: Sequence[str], memory: Mapping[str, int]) -> list[Verdict]:
    """One verdict per machine, and one for what they are together. `memory`: bytes by device."""
    own = {
        name: [device for device in devices if machine_of(device) == name] for name in machines_of(devices)
    }
    verdicts = [
        Verdict(GROUP, called, "ok", _described(own[name], memory))
        for name, called in numbered(devices).items()
    ]
    verdicts.append(
        Verdict(
            GROUP, "installation", "skipped", "limits, folders, paths between GPUs: of each machine by itself",
            "run the doctor on each machine too, without this cluster",
        )
    )  # fmt: skip
    if len({_described(found, memory) for found in own.values()}) > 1:
        verdicts.append(
            Verdict(
                GROUP, "together", "slow", "the machines differ, so with equal shares all wait for the slowest",
                "name devices that are alike in Strategy Selector, as many on each machine",
            )
        )  # fmt: skip
    return verdicts


def pair_of(devices: tuple[str, ...]) -> tuple[str, ...]:
    """Two devices, of two machines where there are two."""
    firsts = {machine_of(device): device for device in reversed(devices)}
    return tuple(firsts[name] for name in machines_of(devices)[:2]) if len(firsts) > 1 else devices[:2]


def _described(devices: Sequence[str], memory: Mapping[str, int]) -> str:
    if is_cpu(devices):
        return f"{len(devices)} on the CPU"
    sizes = ", ".join(f"{memory.get(device, 0) / 1e9:.0f} GB" for device in devices)
    return f"{len(devices)} GPUs: {sizes}"
