"""How much of the work each selected device takes, from what a person wrote: nothing, `memory`, or numbers."""

from __future__ import annotations

import re

from .devices import is_cpu
from .errors import StrategyError
from .topology import Topology
from .topology_probe import read_topology

BY_MEMORY = "memory"


def read_shares(text: str, devices: tuple[str, ...], topology: Topology | None = None) -> tuple[float, ...]:
    """One share per device of `devices` (names as resolve_devices gives them); empty for equal shares.

    ``: equal; `memory`: by the size of each device's memory; `24,16` or `3:2`: these. `topology`: the visible devices,
    for tests. Raises StrategyError naming what does not fit.
    """
    wanted = text.strip().lower()
    if not wanted:
        return ()
    if wanted == BY_MEMORY:
        return _by_memory(devices, read_topology().visible() if topology is None else topology)
    parts = re.split(r"[\s,:;]+", wanted.strip(",:; "))
    try:
        shares = tuple(float(part) for part in parts)
    except ValueError:
        raise StrategyError(
            f"device_shares {text!r} is not understood; write one number for each device such as 24,16, or memory, "
            f"or nothing for equal shares."
        ) from None
    if len(shares) != len(devices):
        raise StrategyError(
            f"device_shares {text!r} names {len(shares)} share(s) and {len(devices)} device(s) are selected "
            f"({', '.join(devices)}); write one number for each."
        )
    return shares


def _by_memory(devices: tuple[str, ...], topology: Topology) -> tuple[float, ...]:
    if is_cpu(devices):
        return ()  # ranks on the CPU share one memory
    by_name = {f"cuda:{i}": device.memory for i, device in enumerate(topology.devices)}
    unknown = [name for name in devices if not by_name.get(name)]
    if unknown:
        raise StrategyError(
            f"device_shares memory: nobody could tell the memory of {', '.join(unknown)}; write numbers such as 24,16."
        )
    return tuple(by_name[name] / 2**30 for name in devices)
