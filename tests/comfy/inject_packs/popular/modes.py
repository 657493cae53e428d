"""A module of the pack that defines no node: its variables are set by other modules."""

from __future__ import annotations

from collections.abc import Callable

SHIFTS: dict[str, Callable[[], float]] = {"none": lambda: 0.0}
chosen = "none"


def shift_of(mode: str) -> float:
    """Returns the shift of a mode."""
    return SHIFTS[mode]()
