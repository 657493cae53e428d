"""The device of a rank: found by its name, what lies on it, and prompts that go there."""

from __future__ import annotations

import torch
from torch import Tensor

from ...devices import local_name
from ...errors import DeviceError
from ...requests import Conditioning


def on_device(prompt: Conditioning, device: torch.device) -> Conditioning:
    def moved(tensor: Tensor) -> Tensor:
        return tensor.to(
            device, copy=True
        )  # on the CPU too: the payload is a mapping of memory that the parent made

    guidance = None if prompt.guidance is None else moved(prompt.guidance)
    return Conditioning(moved(prompt.context), moved(prompt.pooled), guidance)


def device_of(name: str) -> torch.device:
    """cpu:0, cpu:1, … name ranks; to torch there is one CPU. Raises DeviceError for a device that has gone."""
    device = torch.device("cpu" if name.startswith("cpu") else local_name(name))
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise DeviceError(
            f"{name} is not there: a rank sees {torch.cuda.device_count()} GPUs. It may have failed (nvidia-smi, or "
            f"an Xid in the kernel's log), or CUDA_VISIBLE_DEVICES was changed. Take it out of the Strategy Selector's "
            f"devices, or restart ComfyUI.",
            device=name,
        )
    return device


def allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
