"""The memory that other programs use on each device now, read by NVML without a CUDA context.

Memory of this pack's ranks does not count, nor does memory that this process can free: ComfyUI's models make room for
the ranks'. Memory that ComfyUI cannot free counts as another program's.
"""

from __future__ import annotations

from collections.abc import Callable

from ...machine.probe import Nvml, ask, open_nvml, visible_topology
from ...sidecar import pool
from .rank_memory import GPU_BASE_BYTES

# The last function in this list returns the bytes that this process can free on a device.
FREEABLE: list[Callable[[str], int]] = []


def used_by_other_programs(devices: tuple[str, ...]) -> tuple[int, ...]:
    """Returns the bytes on each device; 0 if unknown."""
    known = visible_topology().by_name
    if known.keys().isdisjoint(devices) or (nvml := open_nvml()) is None:
        return (0,) * len(devices)
    used = [_used(nvml, known[device].uuid) if device in known else 0 for device in devices]
    freeable = FREEABLE[-1] if FREEABLE else lambda device: 0
    ours = (used_by_ranks(device) + freeable(device) for device in devices)
    return tuple(max(0, size - own) for size, own in zip(used, ours, strict=True))


def _used(nvml: Nvml, uuid: str) -> int:
    handle = ask(nvml, "nvmlDeviceGetHandleByUUID", uuid, default=None)
    held = None if handle is None else ask(nvml, "nvmlDeviceGetMemoryInfo", handle, default=None)
    return 0 if held is None else int(held.total) - int(held.free)


def used_by_ranks(device: str) -> int:
    ranks = (rank for sidecar in pool.all_sidecars() for rank in sidecar.status().ranks)
    return sum(r.weight_bytes + r.working_bytes + GPU_BASE_BYTES for r in ranks if r.device == device)
