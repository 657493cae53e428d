"""examine(): runs all checks of the doctor in order and returns one report without private data."""

from __future__ import annotations

import platform
import sys
from collections.abc import Callable
from contextlib import ExitStack

from ...devices import machine_of, memory_elsewhere, resolve_devices
from ...errors import ParallelError
from ...machine.fingerprint import cpu_name
from ...machine.probe import read_visible
from ...machine.topology import Topology
from ...wire.calibration import ALL_TO_ALL, Calibration, slowest_rate
from ...wire.checks.findings import Finding
from .devices import check_devices, check_kernels, check_machines, numbered, pair_of
from .links import check_links, of_ranks
from .parity import check_parity, failed_start
from .probes import (
    probe_classes,
    probe_kernels,
    probe_leftovers,
    probe_models,
    probe_system,
    probe_torch,
    probe_versions,
)
from .report import Report, find_private, in_group, scrub_findings
from .system import check_leftovers, check_system
from .versions import check_classes, check_platform, check_versions

OnPhase = Callable[[str], None]
TWO_ON_CPU = ("cpu:0", "cpu:1")  # the ranks to try if there are no GPUs
SOFTWARE, SYSTEM, DEVICES, MACHINES = "Software", "System", "Devices", "Machines"
LINKS, ATTENTION, SAMPLING = "Links", "Attention", "Sampling"
# Ranks cannot start without these.
_NEEDED = ("torch", "torch import", "diffusers", "safetensors")
_CAUSE_LINES = 4  # of a rank's traceback; its last lines say what is missing


def examine(
    devices: tuple[str, ...] = (),
    *,
    on_phase: OnPhase = lambda text: None,
) -> Report:
    """Examines the installation, and `devices` (rank names) with ranks that it starts and ends.

    Without `devices`: all GPUs, or two ranks on the CPU if there are fewer than two GPUs. Machines of a cluster must
    have joined this process. Takes about 20 seconds, and on each GPU the memory of a context and two 64 MiB buffers.
    Raises no error.
    """
    on_phase("looking at the installation")
    found, topology, devices = look_at_installation(devices)
    if found[0].status != "broken":
        on_gpus = devices[0].startswith("cuda")
        if any(one.status == "broken" and one.name in _NEEDED for one in found):
            none = Finding("processes", "skipped", "the processes cannot start without what is missing")
            found += in_group(SAMPLING, [none])
            found += in_group(ATTENTION, check_kernels(probe_kernels(), [], on_gpus))
        else:
            found += _with_ranks(devices, topology, on_gpus, on_phase)
    return Report(scrub_findings(found, find_private(numbered(devices))))


def look_at_installation(devices: tuple[str, ...]) -> tuple[list[Finding], Topology, tuple[str, ...]]:
    """Returns (the findings that need no ranks: software, limits, devices; the devices that this process can see; where
    ranks will run). `devices`: as in examine(). The first finding is on the platform, and the only one if that is
    broken."""
    found = in_group(SOFTWARE, [check_platform(sys.platform, platform.release())])
    topology, driver_problem = Topology((), source="none"), ""
    if found[0].status == "broken":
        return found, topology, devices
    if not (torch_problem := probe_torch()):
        try:
            topology = read_visible()
        except Exception as error:  # the driver's library raises many types for a GPU that fell off the bus
            driver_problem = f"{type(error).__name__}: {error}"
    if not devices:
        usual = resolve_devices("all") if len(topology.devices) > 1 else ()
        devices = usual if len(usual) > 1 else TWO_ON_CPU  # torch may see fewer GPUs than NVML does
    found += in_group(SOFTWARE, check_versions(probe_versions(), len(topology.devices), torch_problem))
    if (classes := probe_classes()) is not None:
        found += in_group(SOFTWARE, [check_classes(*classes)])
    elsewhere = bool(machine_of(devices[0]))
    if not elsewhere:
        found += in_group(SYSTEM, check_system(probe_system(), len(devices), devices[0].startswith("cuda")))
    found += in_group(SYSTEM, [check_leftovers(probe_leftovers())])
    if elsewhere:
        memory = {device: memory_elsewhere(device) for device in devices}
        found += in_group(MACHINES, check_machines(devices, memory))
    else:
        found += in_group(DEVICES, check_devices(topology, cpu_name(), driver_problem))
    return found, topology, devices


def _with_ranks(
    devices: tuple[str, ...], topology: Topology, on_gpus: bool, on_phase: OnPhase
) -> list[Finding]:
    """Starts ranks on `devices`, returns what they find, and ends them."""
    from ...planner.history import record_link  # these import torch, which is known to be installed here
    from ...sidecar.sidecar import Sidecar
    from .rank_probe import probe_links, probe_parity

    across = bool(machine_of(devices[0]))
    found: list[Finding] = []
    calibrations: tuple[Calibration, ...] = ()
    with ExitStack() as stack:

        def group(names: tuple[str, ...]) -> Sidecar:
            sidecar = Sidecar(names)
            stack.callback(sidecar.stop)
            return sidecar

        everyone = group(devices)
        try:
            calibrations = probe_links(everyone, on_phase)
        except (ParallelError, OSError) as error:
            found += in_group(SAMPLING, [failed_start(len(devices), _cause(error))])
        facts = [c.facts for c in calibrations if c.facts is not None]
        if len(calibrations) > 1:
            known = of_ranks(topology, calibrations) if on_gpus and not across else None
            found += in_group(LINKS, check_links(calibrations, known, across=across, models=probe_models()))
            if not across and (rate := slowest_rate(calibrations, ALL_TO_ALL)) is not None:
                record_link(devices, rate, max(c.collective_s for c in calibrations))
        elif calibrations:
            found += in_group(LINKS, [Finding("links", "skipped", "one process has none")])
        found += in_group(ATTENTION, check_kernels(probe_kernels(), facts, on_gpus))
        if not calibrations:
            return found
        if len(devices) == 1:
            alone = Finding("same latent", "skipped", "it takes two devices to compare")
            return found + in_group(SAMPLING, [alone])
        on_phase("sampling the demo model on two processes and on one")
        pair = pair_of(devices)
        if pair != devices:
            everyone.stop()
        try:
            two = everyone if pair == devices else group(pair)
            one = two if across else group(devices[:1])  # a machine serves one group
            dtypes = ("float32", "bfloat16") if on_gpus else ("float32",)
            found += in_group(SAMPLING, check_parity(probe_parity(two, one, dtypes)))
        except (ParallelError, OSError) as error:
            found += in_group(SAMPLING, [failed_start(2, _cause(error))])
    return found


def _cause(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    shown = lines if len(lines) <= _CAUSE_LINES else [lines[0], "…", *lines[-_CAUSE_LINES + 1 :]]
    return " ".join(shown)[:600]
