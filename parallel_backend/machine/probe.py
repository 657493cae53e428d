"""Reads this machine's GPUs and their paths from NVML (nvidia-ml-py), else from torch. Creates no CUDA context."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from types import ModuleType
from typing import Any

from ..devices import is_cpu, resolve_devices
from ..errors import DeviceError
from .topology import Device, Pair, Topology

# nvml.h: nvmlGpuTopologyLevel_t, nvmlGpuP2PCapsIndex_t, nvmlGpuP2PStatus_t, nvmlIntNvLinkDeviceType_t.
_LEVELS = {0: "same board", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}
_P2P_READ, _P2P_OK = 0, 0
_SWITCH = 2
_MAX_LINKS = 18
_SHARED = 0  # nvmlComputeMode_t: any number of processes
# GB/s one way of one PCIe lane per generation, and of one NVLink per nvmlNvlinkVersion_t: 1.0, 2.0, 2.2, 3.0 (A100),
# 3.1 (GeForce and RTX of the 30 series), 4.0 (H100), 5.0 (B200); nominal.
_PCIE_LANE = {1: 0.25, 2: 0.5, 3: 1.0, 4: 2.0, 5: 4.0, 6: 8.0}
_NVLINK = {1: 20.0, 2: 25.0, 3: 25.0, 4: 25.0, 5: 14.0, 6: 25.0, 7: 50.0}


# The module nvidia-ml-py, or a test's replacement. Its handles are opaque.
Nvml = ModuleType | Any
_NvLinks = tuple[int, list[str], bool]

log = logging.getLogger(__name__)


@functools.cache
def open_nvml() -> Nvml:
    """Returns the module, opened until this process ends, since opening takes long with many GPUs; None if it does not
    answer."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception as error:  # no library, no driver, no permission
        log.info("parallel sampling: no gauges of the GPUs (%s)", error)
        return None
    return pynvml


def read_topology(nvml: Nvml = None, *, sys_root: Path = Path("/sys")) -> Topology:
    """Returns this machine's devices from NVML, else from torch (ROCm), else none. Creates no CUDA context.

    `nvml`: a module with nvidia-ml-py's functions, for tests. A missing driver or library is no error.
    """
    if nvml is None:
        try:
            import pynvml
        except ImportError:
            return _from_torch("nvidia-ml-py is not installed; install it for link and NUMA details.")
        nvml = pynvml
    try:
        nvml.nvmlInit()
    except Exception as error:  # NVMLError: no driver, no permission, no library
        return _from_torch(f"NVML does not answer ({error}).")
    try:
        return _ask_nvml(nvml, sys_root)
    finally:
        nvml.nvmlShutdown()


@functools.cache
def visible_topology() -> Topology:
    """Returns read_visible(), read once per process: devices do not change while it lives, NVML is slow, and every job
    needs them."""
    return read_visible()


def read_visible(nvml: Nvml = None) -> Topology:
    """Returns the devices that torch numbers, in torch's order. The order is read from torch's UUIDs in two cases: if
    torch already runs CUDA, since the environment may have changed; or if the cards differ, since CUDA does not promise
    their order. `nvml`: see read_topology."""
    import torch

    found = read_topology(nvml)
    if found.source == "nvml" and (torch.cuda.is_initialized() or found.mixed):
        uuids = _uuids_of_torch()
        if uuids and len(set(uuids)) == len(uuids):
            with suppress(DeviceError):  # some versions of CUDA report the whole GPU's UUID for a MIG slice
                return found.select(uuids)
    return found.visible()


def _uuids_of_torch() -> tuple[str, ...]:
    """Returns UUIDs in the order of device numbers; empty if torch does not know them or GPUs are switched off."""
    import torch

    found = resolve_devices("all")
    if is_cpu(found):
        return ()
    try:
        return tuple(str(torch.cuda.get_device_properties(index).uuid) for index in range(len(found)))
    except (AttributeError, RuntimeError, AssertionError):  # old torch, failing driver, or a fork
        return ()


def _ask_nvml(nvml: Nvml, sys_root: Path) -> Topology:
    """Returns the machine's topology from an initialised `nvml`."""
    members: list[tuple[Any, _NvLinks, Device]] = []  # of each device: its GPU's handle and links
    notes = []
    for i in range(nvml.nvmlDeviceGetCount()):
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(i)
            board = _device(nvml, i, handle, sys_root)
        except nvml.NVMLError as error:  # a GPU that fell off the bus must not hide the others
            notes.append(f"GPU {i} does not answer ({error}), so it is left out.")
            continue
        slices = _slices(nvml, handle, board)
        if slices == []:
            notes.append(f"GPU {i} ({board.name}) is in MIG mode and has no slice, so nothing can run on it.")
        elif slices:
            notes.append(
                f"GPU {i} is cut into {len(slices)} MIG slices; NCCL does not join slices of one GPU."
            )
        links = _nvlinks(nvml, handle)
        members += [(handle, links, device) for device in ([board] if slices is None else slices)]
    pairs = []
    for (one, one_links, a), (other, other_links, b) in combinations(members, 2):
        if a.is_mig or b.is_mig:
            # Slices have no peer access, not even to another slice of the same GPU.
            pair = Pair("MIG", False, min(a.pcie, b.pcie))
        else:
            pair = _pair(nvml, one, other, a, b, one_links, other_links)
        pairs.append((a.uuid, b.uuid, pair))
    return Topology(
        tuple(device for *_, device in members),
        tuple(pairs),
        "nvml",
        _text(ask(nvml, "nvmlSystemGetDriverVersion", default="")),
        tuple(notes),
    )


def _device(nvml: Nvml, index: int, handle: Any, sys_root: Path) -> Device:
    bus = _bus(nvml.nvmlDeviceGetPciInfo(handle).busId)
    # Unknown for a GPU in MIG mode (except to root), and for a GPU that shares its memory with the CPU.
    memory = ask(nvml, "nvmlDeviceGetMemoryInfo", handle, default=None)
    generation = ask(nvml, "nvmlDeviceGetMaxPcieLinkGeneration", handle, default=0)
    width = ask(nvml, "nvmlDeviceGetMaxPcieLinkWidth", handle, default=0)
    return Device(
        index=index,
        uuid=_text(nvml.nvmlDeviceGetUUID(handle)),
        name=_text(nvml.nvmlDeviceGetName(handle)),
        memory=0 if memory is None else int(memory.total),
        capability=tuple(ask(nvml, "nvmlDeviceGetCudaComputeCapability", handle, default=(0, 0))),
        bus=bus,
        numa=_numa(nvml, handle, bus, sys_root),
        pcie=_PCIE_LANE.get(generation, 0.0) * width,
        exclusive=ask(nvml, "nvmlDeviceGetComputeMode", handle, default=_SHARED) != _SHARED,
    )


def _numa(nvml: Nvml, handle: Any, bus: str, sys_root: Path) -> int | None:
    """Returns the NUMA node of the slot from the kernel, None if unknown (-1 in the kernel's file)."""
    file = sys_root / "bus/pci/devices" / bus / "numa_node"
    try:
        node = int(file.read_text())
    except (OSError, ValueError):
        node = ask(nvml, "nvmlDeviceGetNumaNodeId", handle, default=-1)
    return node if node >= 0 else None


def _nvlinks(nvml: Nvml, handle: Any) -> _NvLinks:
    """Returns (version, bus id of the other end per active link, True if links end in a switch)."""
    version, ends, switch = 0, [], False
    for link in range(_MAX_LINKS):
        if not ask(nvml, "nvmlDeviceGetNvLinkState", handle, link, default=0):
            continue
        version = ask(nvml, "nvmlDeviceGetNvLinkVersion", handle, link, default=0) or version
        if ask(nvml, "nvmlDeviceGetNvLinkRemoteDeviceType", handle, link, default=None) == _SWITCH:
            switch = True
        info = ask(nvml, "nvmlDeviceGetNvLinkRemotePciInfo", handle, link, default=None)
        ends.append(_bus(info.busId) if info is not None else "")
    return version, ends, switch


def _slices(nvml: Nvml, handle: Any, board: Device) -> list[Device] | None:
    """Returns the MIG slices of a GPU in MIG mode, None for any other GPU."""
    current, _ = ask(nvml, "nvmlDeviceGetMigMode", handle, default=(0, 0))
    if not current:
        return None
    found = []
    for i in range(ask(nvml, "nvmlDeviceGetMaxMigDeviceCount", handle, default=0)):
        part = ask(nvml, "nvmlDeviceGetMigDeviceHandleByIndex", handle, i, default=None)
        if part is None:  # this place is not occupied
            continue
        found.append(
            replace(
                board,
                uuid=_text(nvml.nvmlDeviceGetUUID(part)),
                name=_text(nvml.nvmlDeviceGetName(part)),
                memory=int(nvml.nvmlDeviceGetMemoryInfo(part).total),
                parent=board.uuid,
            )
        )
    return found


def _pair(
    nvml: Nvml, one: Any, other: Any, a: Device, b: Device, a_links: _NvLinks, b_links: _NvLinks
) -> Pair:
    status = ask(nvml, "nvmlDeviceGetP2PStatus", one, other, _P2P_READ, default=None)
    peer = None if status is None else status == _P2P_OK
    (version, ends, switch), (_, b_ends, b_switch) = a_links, b_links
    per_link = _NVLINK.get(version, 25.0)
    if switch and b_switch:
        return Pair("NVSWITCH", peer, per_link * min(len(ends), len(b_ends)))
    if direct := ends.count(b.bus):
        return Pair("NVLINK", peer, per_link * direct)
    level = ask(nvml, "nvmlDeviceGetTopologyCommonAncestor", one, other, default=None)
    return Pair(_LEVELS.get(level, "unknown"), peer, min(a.pcie, b.pcie))


def ask(nvml: Nvml, function: str, *args: object, default: Any) -> Any:
    """Returns NVML's answer, or `default` if this driver, library or card does not support the call."""
    try:
        return getattr(nvml, function)(*args)
    except (AttributeError, nvml.NVMLError):
        return default


def _text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def _bus(value: bytes | str) -> str:
    """Converts NVML's bus id 00000000:3B:00.0 to the kernel's 0000:3b:00.0."""
    text = _text(value).lower()
    domain, _, rest = text.partition(":")
    return f"{domain[-4:]}:{rest}"


def _from_torch(why: str) -> Topology:
    """Returns the devices in torch's order, on ROCm with their peer access. Reading properties needs no context."""
    import torch

    if is_cpu(resolve_devices("all")) or not torch.cuda.is_available():
        return Topology((), source="none", notes=("No GPU: gloo on CPU.",))
    devices = []
    for i in range(torch.cuda.device_count()):
        p = torch.cuda.get_device_properties(i)
        uuid = str(getattr(p, "uuid", "") or f"cuda:{i}")
        devices.append(Device(i, uuid, p.name, p.total_memory, (p.major, p.minor)))
    can_access = torch.cuda.can_device_access_peer if torch.version.hip else None
    return Topology(tuple(devices), _all_pairs(devices, can_access), "torch", notes=(why,))


def _all_pairs(
    devices: Sequence[Device], can_access: Callable[[int, int], bool] | None
) -> tuple[tuple[str, str, Pair], ...]:
    found = []
    for a, b in combinations(devices, 2):
        peer = None if can_access is None else bool(can_access(a.index, b.index))
        found.append((a.uuid, b.uuid, Pair("unknown", peer, 0.0)))
    return tuple(found)
