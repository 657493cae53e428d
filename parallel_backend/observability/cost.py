"""The cost of a request: the seconds for which it occupied its devices, and money at a price per device-hour."""

from __future__ import annotations

from pathlib import PurePath

from ..requests import ModelSpec
from ..sidecar.group.events import RequestEnded

_HOUR = 3600.0  # s


def device_seconds(event: RequestEnded) -> float:
    """Returns the number of devices times the request's seconds: GPU-seconds if they are GPUs."""
    return len(event.devices) * event.seconds


def money(seconds: float, per_hour: float) -> float:
    """Returns the cost of `seconds` device-seconds, in the currency of `per_hour`."""
    return seconds / _HOUR * per_hour


def amount(value: float) -> str:
    """Formats money with three digits, or with cents from 10 on: a picture costs a fraction of a cent."""
    return f"{value:,.2f}" if value >= 10 else f"{value:.3g}"


def model_name(spec: ModelSpec) -> str:
    """Returns the file's name without its folders."""
    return PurePath(spec.path.replace("\\", "/")).name
