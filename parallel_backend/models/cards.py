"""The GPUs that ranks compute on, as far as a model's dtypes depend on them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .dtypes import HALVES, halves_of_card


def halves_of(devices: Sequence[torch.device]) -> tuple[str, ...]:
    """The 16-bit dtypes that all of the GPUs among these compute in, the preferred one first."""
    found = [_halves(device) for device in devices if device.type == "cuda"]
    return tuple(half for half in HALVES if all(half in halves for halves in found))


def multiply_fp8(devices: Sequence[torch.device]) -> bool:
    """Whether all of these multiply fp8 in hardware (ComfyUI's supports_fp8_compute)."""
    if torch.version.hip is not None:
        return False
    return all(d.type == "cuda" and torch.cuda.get_device_capability(d) >= (8, 9) for d in devices)


def _halves(device: torch.device) -> tuple[str, ...]:
    card = torch.cuda.get_device_properties(device)
    amd = card.gcnArchName if torch.version.hip is not None else None
    return halves_of_card((card.major, card.minor), card.name, amd)
