"""Findings about the devices (their properties, differences and paths) and about the attention kernels on them.
For a cluster: findings about its machines, from what each reported when it joined."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping, Sequence

from ...devices import cluster_of, is_cpu, machine_of, resolve_devices
from ...machine.topology import Device, Topology
from ...wire import deadlines
from ...wire.calibration import RankFacts
from ...wire.checks.findings import Finding
from .report import say_progress

NO_BF16 = (8, 0)  # compute capability below which bfloat16 is emulated
SMALL_MEMORY = 11e9  # bytes; Flux.1 in fp8 has 12 GB of weights
# The kernels by their name in Parallel Flux Loader, and the importable package that each needs.
KERNELS = {
    "flash_3": "flash_attn_interface",
    "flash": "flash_attn",
    "sage": "sageattention",
}


def check_devices(topology: Topology, cpu: str, driver_problem: str = "") -> Iterator[Finding]:
    """Yields a finding per device, and findings about all of them together.

    `cpu`: the processor's name; `driver_problem`: why the driver does not answer, or empty.
    """
    if driver_problem:
        remedy = "look at nvidia-smi and the kernel's log; a GPU that is lost comes back with a restart of the machine"
        yield Finding("driver", "broken", f"does not answer: {driver_problem}", remedy)
        return
    if topology.source == "nvml":
        yield from (Finding("NVML", "slow", note) for note in topology.notes)
    yield from (_device(i, device) for i, device in enumerate(topology.devices))
    if not topology.devices:
        yield Finding("CPU", "ok", cpu)
        yield Finding(
            "GPUs", "skipped", "none: processes run on the CPU, which is for trying things out only"
        )
    elif len(topology.devices) == 1:
        yield Finding("together", "skipped", "one GPU: there is nothing to split a picture over")
    else:
        yield from _several_gpus(topology)


def _several_gpus(topology: Topology) -> Iterator[Finding]:
    if topology.mixed:
        finding = "the cards differ, so with equal shares all wait for the slowest"
        remedy = "leave the slow one out in Strategy Selector, or give it a smaller share"
        yield Finding("together", "slow", finding, remedy)
    parents = [d.parent for d in topology.devices if d.is_mig]
    if len(set(parents)) < len(parents):
        finding = "slices of one GPU are selected, and NCCL does not join slices of one GPU"
        yield Finding("MIG", "broken", finding, "select one slice per GPU, or switch MIG off")
    slowest = topology.kind
    details = tuple(_paths(topology))
    if "without peer access" not in slowest and slowest not in ("SYS", "MIG"):
        yield Finding("paths", "ok", f"slowest: {slowest}", details=details)
        return
    why = "some pairs have no peer access: what they exchange is copied through host memory"
    if slowest == "SYS":
        why = "some pairs are joined across sockets only"
    yield Finding(
        "paths",
        "slow",
        f"{why} (slowest: {slowest})",
        "prefer CFG parallelism, larger images, or devices of one socket; `python -m parallel_backend bench` "
        "shows what your box gains",
        details,
    )


def _device(index: int, device: Device) -> Finding:
    capability = ".".join(map(str, device.capability))
    finding = f"{device.name}, {device.memory / 2**30:.0f} GiB, compute capability {capability}"
    if device.pcie:
        finding += f", PCIe {device.pcie:g} GB/s"
    if device.numa is not None:
        finding += f", NUMA node {device.numa}"
    status, problem, remedy = "ok", "", ""
    if device.exclusive:
        status, remedy = "broken", "nvidia-smi -c DEFAULT, as root"
        problem = (
            ": its compute mode lets one process use it, and ComfyUI with its worker processes is several"
        )
    elif (0, 0) < device.capability < NO_BF16:
        status, remedy = "slow", "use weight_dtype float16 in the loader"
        problem = ": no bfloat16 in hardware"
    elif 0 < device.memory < SMALL_MEMORY:
        status, remedy = "slow", "shard the weights, or use PipeFusion, over several GPUs"
        problem = ": Flux.1 does not fit, even in fp8"
    return Finding(f"GPU {index}", status, finding + problem, remedy)


def _paths(topology: Topology) -> list[str]:
    """Returns the rows of a matrix like nvidia-smi's: the path of each pair, with its one-way GB/s if known."""
    ids = [d.uuid for d in topology.devices]
    rows = ["".join([" " * 6, *(f"{f'GPU {i}':>10s}" for i in range(len(ids)))])]
    for i, one in enumerate(ids):
        cells = []
        for other in ids:
            pair = None if one == other else topology.pair(one, other)
            cells.append("·" if pair is None else f"{pair.path} {pair.rate:.0f}" if pair.rate else pair.path)
        rows.append("".join([f"GPU {i:<2d}", *(f"{cell:>10s}" for cell in cells)]))
    return rows


def resolve_for_command(text: str) -> tuple[str, ...]:
    """Returns resolve_devices(text) after waiting for the cluster's machines, which it tells. For `cluster:NAME`, waits
    until no more machines join. Raises DeviceError."""
    cluster = cluster_of(text)
    if not cluster:
        return resolve_devices(text)
    from ...sidecar.cluster import head as clusters  # late: this computer's own devices need no certificates

    clusters.find_by_name()
    head = clusters.open_head(cluster)
    say_progress(f"waiting on port {head.port} for the machines of the cluster {cluster}")
    names = set(text.lower().replace(",", " ").replace(";", " ").split())
    until, found, since = time.monotonic() + deadlines.MACHINES, head.devices(), time.monotonic()
    while time.monotonic() < until and (not found or time.monotonic() - since < deadlines.GATHER):
        time.sleep(deadlines.POLL)
        if (now := head.devices()) != found:
            found, since = now, time.monotonic()
        if names <= set(found):
            break
    return resolve_devices(text)


def machines_of(devices: Sequence[str]) -> tuple[str, ...]:
    """Returns CLUSTER/MACHINE of each machine, in the order of the devices; () for devices of this computer."""
    return tuple(dict.fromkeys(filter(None, map(machine_of, devices))))


def numbered(devices: Sequence[str]) -> dict[str, str]:
    """Returns a numbered name for each machine (CLUSTER/MACHINE), for reports that are shown to others."""
    return {name: f"machine {number}" for number, name in enumerate(machines_of(devices), 1)}


def check_machines(devices: Sequence[str], memory: Mapping[str, int]) -> Iterator[Finding]:
    """Yields a finding per machine, and findings about all of them together. `memory`: bytes by device."""
    seen = []
    for name, called in numbered(devices).items():
        seen.append(_described([device for device in devices if machine_of(device) == name], memory))
        yield Finding(called, "ok", seen[-1])
    finding = "limits, folders, paths between GPUs: of each machine by itself"
    yield Finding(
        "installation", "skipped", finding, "run the doctor on each machine too, without this cluster"
    )
    if len(set(seen)) > 1:
        finding = "the machines differ, so with equal shares all wait for the slowest"
        remedy = "name devices that are alike in Strategy Selector, as many on each machine"
        yield Finding("together", "slow", finding, remedy)


def pair_of(devices: tuple[str, ...]) -> tuple[str, ...]:
    """Returns two of the devices, on two different machines if there are several."""
    firsts = {machine_of(device): device for device in reversed(devices)}
    return tuple(firsts[name] for name in machines_of(devices)[:2]) if len(firsts) > 1 else devices[:2]


def _described(devices: Sequence[str], memory: Mapping[str, int]) -> str:
    if is_cpu(devices):
        return f"{len(devices)} on the CPU"
    sizes = ", ".join(f"{memory.get(device, 0) / 1e9:.0f} GB" for device in devices)
    return f"{len(devices)} GPUs: {sizes}"


def check_kernels(packages: Collection[str], facts: Sequence[RankFacts], on_gpus: bool) -> Iterator[Finding]:
    """Yields a finding on the installed kernels and one on the kernel in use. `packages`: those of KERNELS that can be
    imported; `facts`: the ranks' reports on the kernel that they would use."""
    found = [name for name, package in KERNELS.items() if package in packages]
    listed = ", ".join(["torch", *found])
    if on_gpus and not {"flash_3", "flash"} & set(found):
        remedy = "FlashAttention (pip install flash-attn) can be faster on GPUs before Hopper"
        yield Finding("installed", "ok", f"{listed} (torch's own kernels)", remedy)
    else:
        yield Finding("installed", "ok", listed)
    broken = next((f for f in facts if f.kernel_problem), None)
    if not facts:
        yield Finding("in use", "skipped", "no process could be asked")
    elif broken is not None:
        yield Finding(
            "in use",
            "broken",
            f"{broken.kernel or 'the attention kernel'} does not work here: {broken.kernel_problem}",
            "install a build of it that fits this torch, remove it, or choose attention: torch in "
            "Parallel Flux Loader",
        )
    else:
        names = ", ".join(dict.fromkeys(f.kernel for f in facts))
        yield Finding("in use", "ok", f"{names}, compared with exact attention")
