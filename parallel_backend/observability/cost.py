"""What a request cost: the seconds for which it held its devices, and money at a price per device-hour."""

from __future__ import annotations

from pathlib import PurePath

from ..requests import ModelSpec
from ..sidecar.group.events import RequestEnded

_HOUR = 3600.0  # s


def device_seconds(event: RequestEnded) -> float:
    """Devices times the seconds that the request held them: GPU-seconds, where they are GPUs."""
    return len(event.devices) * event.seconds


def money(seconds: float, per_hour: float) -> float:
    """Of so many device-seconds, in the currency of `per_hour`."""
    return seconds / _HOUR * per_hour


def amount(value: float) -> str:
    """Money to three digits, cents or more where it is a lot: a picture costs a fraction of a cent."""
    return f"{value:,.2f}" if value >= 10 else f"{value:.3g}"


def model_name(spec: ModelSpec) -> str:
    """Its file's name, without the folders."""
    return PurePath(spec.path.replace("\\", "/")).name
