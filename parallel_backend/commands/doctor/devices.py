"""Verdicts about the devices: what they are, whether they differ, and what NVML says of their paths; and about the
machines of a cluster, as they said themselves when they joined."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ...devices import is_cpu, machine_of
from ...machine.topology import Device, Topology
from .report import Verdict

GROUP, MACHINES = "Devices", "Machines"
NO_BF16 = (8, 0)  # compute capability below which bfloat16 is emulated
SMALL_MEMORY = 11e9  # bytes; Flux.1 in fp8 has 12 GB of weights


def check_devices(topology: Topology, cpu: str, driver_problem: str = "") -> list[Verdict]:
    """One verdict per device, and one for what they are together.

    `cpu`: the processor's name; `driver_problem`: why the driver does not answer, or empty.
    """
    if driver_problem:
        remedy = "look at nvidia-smi and the kernel's log; a GPU that is lost comes back with a restart of the machine"
        return [Verdict(GROUP, "driver", "broken", f"does not answer: {driver_problem}", remedy)]
    noted = [Verdict(GROUP, "NVML", "slow", note) for note in topology.notes if topology.source == "nvml"]
    if not topology.devices:
        verdicts = [*noted, Verdict(GROUP, "CPU", "ok", cpu)]
        verdicts.append(
            Verdict(
                GROUP,
                "GPUs",
                "skipped",
                "none: processes run on the CPU, which is for trying things out only",
            )
        )
        return verdicts
    verdicts = [*noted, *(_device(i, device) for i, device in enumerate(topology.devices))]
    if len(topology.devices) == 1:
        verdicts.append(
            Verdict(GROUP, "together", "skipped", "one GPU: there is nothing to split a picture over")
        )
        return verdicts
    if topology.mixed:
        verdicts.append(
            Verdict(
                GROUP,
                "together",
                "slow",
                "the cards differ, so with equal shares all wait for the slowest",
                "leave the slow one out in Strategy Selector, or give it a smaller share",
            )
        )
    parents = [d.parent for d in topology.devices if d.is_mig]
    if len(set(parents)) < len(parents):
        verdicts.append(
            Verdict(
                GROUP,
                "MIG",
                "broken",
                "slices of one GPU are selected, and NCCL does not join slices of one GPU",
                "select one slice per GPU, or switch MIG off",
            )
        )
    slowest = topology.kind
    details = tuple(_paths(topology))
    if "without peer access" in slowest or slowest in ("SYS", "MIG"):
        why = {"SYS": "some pairs are joined across sockets only"}.get(
            slowest, "some pairs have no peer access: what they exchange is copied through host memory"
        )
        verdicts.append(
            Verdict(
                GROUP,
                "paths",
                "slow",
                f"{why} (slowest: {slowest})",
                "prefer CFG parallelism, larger images, or devices of one socket; `python -m parallel_backend bench` "
                "shows what your box gains",
                details,
            )
        )
    else:
        verdicts.append(Verdict(GROUP, "paths", "ok", f"slowest: {slowest}", details=details))
    return verdicts


def _device(index: int, device: Device) -> Verdict:
    capability = ".".join(map(str, device.capability))
    finding = f"{device.name}, {device.memory / 2**30:.0f} GiB, compute capability {capability}"
    if device.pcie:
        finding += f", PCIe {device.pcie:g} GB/s"
    if device.numa is not None:
        finding += f", NUMA node {device.numa}"
    name = f"GPU {index}"
    if device.exclusive:
        return Verdict(
            GROUP,
            name,
            "broken",
            f"{finding}: its compute mode lets one process use it, and ComfyUI with its worker processes is several",
            "nvidia-smi -c DEFAULT, as root",
        )
    if (0, 0) < device.capability < NO_BF16:
        return Verdict(
            GROUP,
            name,
            "slow",
            f"{finding}: no bfloat16 in hardware",
            "use weight_dtype float16 in the loader",
        )
    if 0 < device.memory < SMALL_MEMORY:
        return Verdict(
            GROUP,
            name,
            "slow",
            f"{finding}: Flux.1 does not fit, even in fp8",
            "shard the weights, or use PipeFusion, over several GPUs",
        )
    return Verdict(GROUP, name, "ok", finding)


def _paths(topology: Topology) -> list[str]:
    """nvidia-smi's matrix: the path of each pair, GB/s in one direction where it is known."""
    ids = [d.uuid for d in topology.devices]
    rows = ["".join([" " * 6, *(f"{f'GPU {i}':>10s}" for i in range(len(ids)))])]
    for i, one in enumerate(ids):
        cells = []
        for other in ids:
            pair = None if one == other else topology.pair(one, other)
            cells.append("·" if pair is None else f"{pair.path} {pair.rate:.0f}" if pair.rate else pair.path)
        rows.append("".join([f"GPU {i:<2d}", *(f"{cell:>10s}" for cell in cells)]))
    return rows


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
        Verdict(MACHINES, called, "ok", _described(own[name], memory))
        for name, called in numbered(devices).items()
    ]
    verdicts.append(
        Verdict(
            MACHINES, "installation", "skipped", "limits, folders, paths between GPUs: of each machine by itself",
            "run the doctor on each machine too, without this cluster",
        )
    )  # fmt: skip
    if len({_described(found, memory) for found in own.values()}) > 1:
        verdicts.append(
            Verdict(
                MACHINES, "together", "slow", "the machines differ, so with equal shares all wait for the slowest",
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
