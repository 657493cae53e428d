"""Findings about the operating system: shared memory, limits, variables, processes that were left behind."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ...wire.checks.findings import Finding

MIB = 1024**2
# Docker's default is 64 MiB. NCCL needs about 10 MiB in /dev/shm for each pair of GPUs without peer access.
SMALL_SHM = 64 * MIB
ENOUGH_SHM = 512 * MIB
# A rank opens its link, a store, sockets to every peer for collectives, and the mapped files.
FEWEST_FILES, ENOUGH_FILES = 256, 1024
LEAST_CORES_PER_RANK = 2  # one launches kernels, one serves the links
# Variables that people set once as a workaround and forget: (name, values, what it costs).
VARIABLES = (
    ("NCCL_P2P_DISABLE", ("1",), "GPUs exchange everything through host memory"),
    ("NCCL_SHM_DISABLE", ("1",), "GPUs without peer access exchange everything over sockets"),
    ("CUDA_LAUNCH_BLOCKING", ("1",), "every kernel is waited for"),
    ("TORCH_NCCL_BLOCKING_WAIT", ("1",), "every collective is waited for"),
    ("TORCH_DISTRIBUTED_DEBUG", ("DETAIL",), "every collective is checked by another one"),
)


@dataclass(frozen=True)
class System:
    """Observed limits. Sizes in bytes. `shm`: of /dev/shm, None if missing; `open_files`, `locked_memory`: -1 for no
    limit."""

    cores: int
    shm: int | None
    shm_free: int
    open_files: int
    locked_memory: int
    variables: Mapping[str, str]


def check_system(seen: System, ranks: int, on_gpus: bool) -> Iterator[Finding]:
    """Yields the findings about the system for a group of `ranks` ranks."""
    yield _cores(seen, ranks, on_gpus)
    yield _shared_memory(seen, ranks, on_gpus)
    yield _open_files(seen)
    locked = "no limit" if seen.locked_memory < 0 else _size(seen.locked_memory)
    # CUDA pins host memory through its driver, which ignores this limit. Only InfiniBand's verbs are bound by it.
    yield Finding("locked memory", "ok", f"{locked} (ulimit -l; matters for InfiniBand only)")
    for name, values, cost in VARIABLES:
        if seen.variables.get(name, "").upper() in values:
            finding = f"{name}={seen.variables[name]} is set: {cost}"
            yield Finding("environment", "slow", finding, f"unset {name} unless something fails without it")


def check_leftovers(ranks: Sequence[int]) -> Finding:
    """Reports `ranks`, process ids. Ranks die with their parent: one that outlived it is a fault, and holds memory."""
    if ranks:
        pids = " ".join(map(str, ranks))
        return Finding(
            "leftovers",
            "broken",
            f"{len(ranks)} worker processes live on without the ComfyUI that started them, and hold memory",
            f"kill {pids}, and report how that ComfyUI ended",
        )
    return Finding("leftovers", "ok", "none")


def _cores(seen: System, ranks: int, on_gpus: bool) -> Finding:
    finding = f"{seen.cores} for {ranks} processes"
    if on_gpus and seen.cores < LEAST_CORES_PER_RANK * ranks:
        return Finding(
            "CPU cores",
            "slow",
            f"{finding}: each needs about {LEAST_CORES_PER_RANK} to launch its kernels in time",
            "give the container or virtual machine more cores, or use fewer GPUs",
        )
    return Finding("CPU cores", "ok", finding)


def _shared_memory(seen: System, ranks: int, on_gpus: bool) -> Finding:
    needed = on_gpus and ranks > 1
    if seen.shm is None:
        status = "broken" if needed else "ok"
        return Finding("/dev/shm", status, "is missing", "mount a tmpfs there" if needed else "")
    finding = f"{_size(seen.shm)}, {_size(seen.shm_free)} free"
    remedy = "start the container with --shm-size=1g (docker) or an emptyDir of medium Memory (Kubernetes)"
    if needed and seen.shm_free <= SMALL_SHM:
        return Finding("/dev/shm", "broken", f"{finding}: NCCL fails where GPUs have no peer access", remedy)
    if needed and seen.shm_free < ENOUGH_SHM:
        return Finding("/dev/shm", "slow", f"{finding}: enough for few GPUs only", remedy)
    return Finding("/dev/shm", "ok", finding if needed else f"{finding} (not used here)")


def _open_files(seen: System) -> Finding:
    finding = "no limit" if seen.open_files < 0 else f"{seen.open_files} (ulimit -n)"
    remedy = "ulimit -n 4096 before ComfyUI starts, or LimitNOFILE= in its service"
    if 0 <= seen.open_files < FEWEST_FILES:
        return Finding("open files", "broken", f"{finding}: too few for the links of the processes", remedy)
    if 0 <= seen.open_files < ENOUGH_FILES:
        return Finding("open files", "slow", f"{finding}: enough for few processes only", remedy)
    return Finding("open files", "ok", finding)


def _size(size: int) -> str:
    return f"{size / MIB / 1024:.1f} GiB" if size >= 1024 * MIB else f"{size / MIB:.0f} MiB"
