"""A stand-in for torch.cuda with the functions that checks of a device call. It answers as torch documents it."""

from __future__ import annotations

import warnings
from types import SimpleNamespace


class FakeCuda:
    """A fake torch.cuda. `sizes`: bytes of memory of each card, in the order of the cards' numbers."""

    def __init__(self, backend="native", uuid="5a1b2c3d-0000-1111-2222-333344445555", sizes=(48 * 10**9,)):
        self.backend, self.uuid, self.sizes = backend, uuid, sizes
        self.modes: list[str] = []
        self._mode = 0

    def get_allocator_backend(self):
        return self.backend

    def get_device_properties(self, device):
        return SimpleNamespace(
            name="NVIDIA L40",
            major=8,
            minor=9,
            multi_processor_count=142,
            total_memory=self.sizes[device.index or 0],
            uuid=self.uuid,
        )

    def mem_get_info(self, device):
        return 40 * 10**9, 48 * 10**9

    def get_sync_debug_mode(self):
        return self._mode

    def set_sync_debug_mode(self, mode):
        """Sets the mode: "default", "warn", "error", or 0, 1, 2."""
        self._mode = {"default": 0, "warn": 1, "error": 2}.get(mode, mode)
        self.modes.append(mode)

    def wait(self):
        """Does what torch does when the host would wait for the device, for example in `Tensor.item`."""
        if self._mode == 2:
            raise RuntimeError("called a synchronizing CUDA operation")
        if self._mode == 1:
            warnings.warn("called a synchronizing CUDA operation", UserWarning, stacklevel=2)
