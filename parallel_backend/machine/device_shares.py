"""The share of the work that each selected device takes, read from the user's text: nothing, `memory`, or numbers."""

from __future__ import annotations

import re

from ..devices import is_cpu, memory_elsewhere
from ..errors import StrategyError
from .probe import visible_topology

BY_MEMORY = "memory"
INPUT = ("device_shares",)  # the input of Strategy Selector that errors refer to


def read_shares(text: str, devices: tuple[str, ...]) -> tuple[float, ...]:
    """Returns one share per device of `devices` (names from resolve_devices); empty for equal shares.

    `text`: empty for equal shares; `memory`: in proportion to each device's memory; `24,16` or `3:2`: these numbers.
    Raises StrategyError with what is wrong in `text`.
    """
    requested = text.strip().lower()
    if not requested:
        return ()
    if requested == BY_MEMORY:
        return _by_memory(devices)
    parts = re.split(r"[\s,:;]+", requested.strip(",:; "))
    try:
        shares = tuple(float(part) for part in parts)
    except ValueError:
        raise StrategyError(
            f"device_shares {text!r} is not understood; write one number for each device such as 24,16, or memory, "
            f"or nothing for equal shares.",
            inputs=INPUT,
        ) from None
    if len(shares) != len(devices):
        raise StrategyError(
            f"device_shares {text!r}: write one number for each selected device ({', '.join(devices)}), "
            f"{len(devices)} in all and not {len(shares)}.",
            inputs=INPUT,
        )
    return shares


def unequal_remark(devices: tuple[str, ...]) -> str | None:
    """Returns a remark for the user if devices with equal shares differ in memory by more than a tenth, else None."""
    if len(devices) < 2 or is_cpu(devices):
        return None
    known = visible_topology().by_name
    sizes = [known[name].memory for name in devices if name in known and known[name].memory]
    if len(sizes) < len(devices) or max(sizes) <= 1.1 * min(sizes):
        return None
    return (
        f"the devices differ ({', '.join(f'{size / 2**30:.0f}' for size in sizes)} GiB) and share evenly, so the "
        f"smallest sets the pace and the limit; device_shares memory, or numbers such as 3,2, gives each its part."
    )


def device_memory(devices: tuple[str, ...]) -> tuple[int, ...]:
    """Returns the bytes of memory of each device, 0 if unknown."""
    known = visible_topology().by_name
    return tuple((name in known and known[name].memory) or memory_elsewhere(name) for name in devices)


def _by_memory(devices: tuple[str, ...]) -> tuple[float, ...]:
    if is_cpu(devices):
        return ()  # ranks on the CPU share one memory
    sizes = device_memory(devices)
    if unknown := [name for name, size in zip(devices, sizes, strict=True) if not size]:
        raise StrategyError(
            f"device_shares memory: nobody could tell the memory of {', '.join(unknown)}; write numbers such as 24,16.",
            inputs=INPUT,
        )
    return tuple(size / 2**30 for size in sizes)
