"""Resolves what a person writes for `devices`, such as `all`, `0,1,3` or `cpu:2`, without creating a CUDA context."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

from .errors import DeviceError

# Several ranks on the CPU exist for tests, demos and machines without a GPU; more than this is a typing error.
MAX_CPU_RANKS = 16
_MOST_LETTERS = 1000  # far more than any list of devices needs, and few enough digits for int()

_GPUS = r"(?:cuda:)?([0-9]+)(?:\s*-\s*(?:cuda:)?([0-9]+))?"  # one index, or a range
_BETWEEN = r"(?:\s*[,;]\s*|\s+)"

# A device of another machine: its local name, the cluster and the machine, as in cuda:0@NAME/MACHINE.
_REMOTE = re.compile(r"(?:cuda|cpu):[0-9]+@([a-z0-9_.-]+)/([a-z0-9_.-]+)")
_CLUSTER = "cluster:"
_CLUSTER_IN = re.compile(r"cluster:(.*)|(?:cuda|cpu):[0-9]+@([^/]*)/")

_only_cpu = False


class _Clusters(NamedTuple):
    """The functions that find_clusters_by was given."""

    devices_of: Callable[[str], tuple[str, ...]]
    memory_of: Callable[[str], int]


_clusters: _Clusters | None = None


def use_only_cpu() -> None:
    """Makes this process use no GPU from now on: a person started ComfyUI with --cpu."""
    global _only_cpu
    _only_cpu = True


def find_clusters_by(devices_of: Callable[[str], tuple[str, ...]], memory_of: Callable[[str], int]) -> None:
    """Sets the functions that resolve cluster:NAME from now on. `devices_of`: returns a cluster's devices, machine by
    machine, and raises DeviceError if no machine has joined; `memory_of`: a device's bytes, 0 if unknown."""
    global _clusters
    _clusters = _Clusters(devices_of, memory_of)


def memory_elsewhere(device: str) -> int:
    """Returns the memory in bytes of a device of another machine; 0 if unknown."""
    return 0 if _clusters is None else _clusters.memory_of(device)


def resolve_devices(text: str) -> tuple[str, ...]:
    """Returns the device names in rank order, e.g. ("cuda:0", "cuda:1") or ("cpu:0", "cpu:1").

    `all`: every GPU, or one CPU rank if there is no GPU; `0,1,3`, also `0 1 3`, `0;1;3`, `cuda:0,1` and `0-3`: these
    GPUs; `cpu:2`: two ranks on the CPU; `cpu:2,cpu:3`: these two CPU ranks, so that another group can use the rest;
    `cluster:NAME`: all devices of a cluster, machine by machine, with names such as cuda:0@NAME/MACHINE, which may also
    be listed instead. Raises DeviceError naming what does not exist.
    """
    if len(text) > _MOST_LETTERS:
        raise _refuse(f"{text[:20] + '...'!r} has {len(text)} letters; write e.g. all, 0,1,3 or cpu:2.")
    requested = text.strip().lower()
    if requested.startswith(_CLUSTER):
        return _of_cluster(requested.removeprefix(_CLUSTER))
    if "@" in requested:
        return _remote(requested)
    import torch  # late: commands that use no devices run without torch

    gpus = 0 if _only_cpu else torch.cuda.device_count()
    if requested in ("", "all"):
        return tuple(f"cuda:{i}" for i in range(gpus)) or ("cpu:0",)
    if cpu := re.fullmatch(r"cpu(?::(\d+))?", requested):
        ranks = int(cpu[1] or 1)
        if not 1 <= ranks <= MAX_CPU_RANKS:
            nearest = f"cpu:{min(max(ranks, 1), MAX_CPU_RANKS)}"
            raise _refuse(f"{text!r}: the CPU takes 1 to {MAX_CPU_RANKS} processes; use e.g. cpu:2.", nearest)
        return tuple(f"cpu:{i}" for i in range(ranks))
    if re.fullmatch(rf"cpu:\d+({_BETWEEN}cpu:\d+)+", requested):
        return _cpu_ranks(text, [int(index) for index in re.findall(r"\d+", requested)])
    if not re.fullmatch(rf"{_GPUS}({_BETWEEN}{_GPUS})*", requested):
        raise _refuse(
            f"{text!r} is not understood; write 'all', GPU numbers such as '0,1,3' or '0-3', or 'cpu:2'."
        )
    indices: list[int] = []
    for first, last in re.findall(_GPUS, requested):
        if last and int(last) < int(first):
            raise _refuse(f"{text!r}: from {first} to {last} is no range; write the smaller GPU first: 0-3.")
        # No machine has so many GPUs, and the first that is missing is named below.
        indices += range(int(first), min(int(last or first), int(first) + _MOST_LETTERS) + 1)
    if len(set(indices)) != len(indices):
        once = ",".join(str(i) for i in dict.fromkeys(indices) if i < gpus)
        raise _refuse(f"{text!r} names a GPU twice; each process needs a GPU of its own.", once or "all")
    missing = [i for i in indices if i >= gpus]
    if missing:
        without = "no GPU, since ComfyUI runs with --cpu" if _only_cpu else "no GPU that torch can use"
        has = f"GPUs 0 to {gpus - 1}" if gpus > 1 else "GPU 0 only" if gpus else without
        raise _refuse(
            f"{text!r}: GPU {missing[0]} does not exist; this machine has {has}. "
            f"Use 'all'{' or cpu:2 to run on the CPU' if not gpus else ''}.",
            ",".join(str(i) for i in indices if i < gpus) or "all",
        )
    return tuple(f"cuda:{i}" for i in indices)


def devices_of_a_run(text: str) -> tuple[str, ...]:
    """Returns resolve_devices(text) for a run. Raises DeviceError if `all` would silently mean the CPU although ComfyUI
    computes on an accelerator that ranks cannot use."""
    found = resolve_devices(text)
    if text.strip().lower() not in ("", "all") or not is_cpu(found) or _only_cpu:
        return found
    import torch

    other = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    # macOS gets another error (sidecar/group/supervisor.py)
    if other is None or other.type in ("cuda", "mps"):
        return found
    raise _refuse(
        f"{text!r}: processes compute on GPUs of NVIDIA (CUDA) and AMD (ROCm), and ComfyUI computes on "
        f"{other.type.upper()} here. Take the parallel nodes out, or write cpu:2 to run on the CPU.",
        "cpu:2",
    )


def cluster_of(text: str) -> str:
    """Returns the name of the cluster whose devices `text` names; "" if it names devices of this computer."""
    found = _CLUSTER_IN.match(text.strip().lower())
    return (found[1] or found[2] or "") if found else ""


def _of_cluster(name: str) -> tuple[str, ...]:
    if _clusters is None:
        raise _refuse(
            f"'cluster:{name}': clusters are used by ComfyUI, and by the commands doctor and bench."
        )
    return _clusters.devices_of(name)


def _remote(text: str) -> tuple[str, ...]:
    named = [part for part in re.split(r"[\s,;]+", text) if part]
    found = [_REMOTE.fullmatch(part) for part in named]
    clusters = {match[1] for match in found if match is not None}
    if len(clusters) != 1 or not all(found):
        raise _refuse(f"{text[:80]!r} is not understood; write cluster:NAME for all devices of a cluster.")
    cluster = clusters.pop()
    missing = sorted(set(named) - set(_of_cluster(cluster)))
    if missing or len(set(named)) < len(named):
        wrong = f"{_CLUSTER}{cluster} has no {', '.join(missing)}" if missing else "each device is named once"
        raise _refuse(f"{text[:80]!r}: {wrong}.", f"{_CLUSTER}{cluster}")
    return tuple(named)


def machine_of(device: str) -> str:
    """Returns CLUSTER/MACHINE for a device of another machine; "" for a device of this computer."""
    return device.partition("@")[2]


def local_name(device: str) -> str:
    """Returns the name of a device on its own machine."""
    return device.partition("@")[0]


def _cpu_ranks(text: str, indices: Sequence[int]) -> tuple[str, ...]:
    if len(set(indices)) != len(indices) or max(indices) >= MAX_CPU_RANKS:
        last = MAX_CPU_RANKS - 1
        nearest = f"cpu:{min(len(indices), MAX_CPU_RANKS)}"
        raise _refuse(f"{text!r}: processes on the CPU are cpu:0 to cpu:{last}, each named once.", nearest)
    return tuple(f"cpu:{index}" for index in indices)


def name_devices(devices: Sequence[str]) -> str:
    """Returns the text that resolve_devices resolves to `devices`."""
    if any(map(machine_of, devices)):
        return ",".join(devices)
    if is_cpu(devices):
        first = tuple(f"cpu:{rank}" for rank in range(len(devices)))
        return f"cpu:{len(devices)}" if tuple(devices) == first else ",".join(devices)
    return ",".join(device.removeprefix("cuda:") for device in devices)


def _refuse(words: str, nearest: str = "all") -> DeviceError:
    return DeviceError(f"devices {words}", nearest=(("devices", nearest),))


def is_cpu(devices: Sequence[str]) -> bool:
    return all(name.startswith("cpu") for name in devices)
