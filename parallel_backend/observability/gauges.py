"""Current readings of each device: memory, utilisation, temperature, power. Uses NVML, without a CUDA context."""

from __future__ import annotations

from dataclasses import dataclass

from ..devices import is_cpu, machine_of
from ..host_memory import available_memory, host_memory
from ..machine.fingerprint import cpu_name
from ..machine.probe import ask, open_nvml, visible_topology
from ..machine.topology import Device

_PROCESSES = ("nvmlDeviceGetComputeRunningProcesses", "nvmlDeviceGetGraphicsRunningProcesses")
_TEMPERATURE_OF_GPU = 0  # nvml.h: NVML_TEMPERATURE_GPU


@dataclass(frozen=True)
class Gauge:
    """The readings of one device. Bytes, 0 if unknown; `utilisation`: 0 to 1, `temperature`: °C, `power`,
    `power_limit`: W, None if not measured. `shared`: True if several names mean this device (ranks on the CPU)."""

    name: str
    total_bytes: int
    free_bytes: int
    utilisation: float | None = None
    temperature: int | None = None
    power: float | None = None
    power_limit: float | None = None
    shared: bool = False


def read_gauges(devices: tuple[str, ...]) -> dict[str, Gauge]:
    """Returns the readings by device name, without unknown devices. Raises no driver errors."""
    found: dict[str, Gauge] = {}
    local_cpus = [device for device in devices if is_cpu((device,)) and not machine_of(device)]
    if local_cpus:
        found |= dict.fromkeys(local_cpus, _host())
    if len(found) < len(devices):
        known = visible_topology().by_name
        found |= {name: _gpu(device) for name, device in known.items() if name in devices}
    return found


def read_free_bytes(device: str) -> int:
    """Returns the free bytes of one device, 0 if unknown."""
    gauge = read_gauges((device,)).get(device)
    return 0 if gauge is None else gauge.free_bytes


def running_processes(devices: tuple[str, ...]) -> dict[str, dict[int, int]]:
    """Returns {device: {pid: bytes, 0 if unknown}} for the processes that NVML reports."""
    found: dict[str, dict[int, int]] = {}
    nvml = None if is_cpu(devices) else open_nvml()
    if nvml is None:
        return found
    for name, known in visible_topology().by_name.items():
        if name not in devices:
            continue
        handle = ask(nvml, "nvmlDeviceGetHandleByUUID", known.uuid, default=None)
        for question in _PROCESSES if handle is not None else ():
            for one in ask(nvml, question, handle, default=()):
                found.setdefault(name, {})[int(one.pid)] = int(one.usedGpuMemory or 0)
    return found


def _gpu(device: Device) -> Gauge:
    nvml = open_nvml()
    handle = None if nvml is None else ask(nvml, "nvmlDeviceGetHandleByUUID", device.uuid, default=None)
    if handle is None:
        return Gauge(device.name, device.memory, 0)
    held = ask(nvml, "nvmlDeviceGetMemoryInfo", handle, default=None)
    rates = ask(nvml, "nvmlDeviceGetUtilizationRates", handle, default=None)
    power = ask(nvml, "nvmlDeviceGetPowerUsage", handle, default=None)
    limit = ask(nvml, "nvmlDeviceGetEnforcedPowerLimit", handle, default=None)
    return Gauge(
        name=device.name,
        total_bytes=device.memory if held is None else int(held.total),
        free_bytes=0 if held is None else int(held.free),
        utilisation=None if rates is None else rates.gpu / 100,
        temperature=ask(nvml, "nvmlDeviceGetTemperature", handle, _TEMPERATURE_OF_GPU, default=None),
        power=None if power is None else power / 1000,  # NVML answers in mW
        power_limit=None if limit is None else limit / 1000,
    )


def _host() -> Gauge:
    total = host_memory()
    return Gauge(cpu_name(), total, min(total, available_memory(total)), shared=True)
