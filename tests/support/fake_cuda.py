"""A stand-in for torch.cuda with what checks of a device ask, answering as torch documents it."""

from __future__ import annotations

import warnings
from types import SimpleNamespace

import torch


class FakeCuda:
    """`sizes`: bytes of each card's memory, by its number."""

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
        """ "default", "warn", "error", or 0, 1, 2."""
        self._mode = {"default": 0, "warn": 1, "error": 2}.get(mode, mode)
        self.modes.append(mode)

    def wait(self):
        """What torch does where the host would wait for the device: `Tensor.item`, say."""
        if self._mode == 2:
            raise RuntimeError("called a synchronizing CUDA operation")
        if self._mode == 1:
            warnings.warn("called a synchronizing CUDA operation", UserWarning, stacklevel=2)


class OnGpu:
    """A tensor of a GPU as far as ArenaWriter looks at it: one of inference mode, that nobody counts writes into."""

    def __init__(self, numbers: torch.Tensor, device: str = "cuda:0"):
        self._numbers, self.device = numbers, torch.device(device)
        self.dtype, self.shape, self.nbytes = numbers.dtype, numbers.shape, numbers.nbytes

    def detach(self):
        return self._numbers

    def is_inference(self):
        return True


class FakeRuntime:
    """The part of torch.cuda by which memory is locked and copies are waited for; `did`: what was asked, in order."""

    def __init__(self):
        self.did, self.locked = [], set()

    def put_in_place(self, monkeypatch):
        monkeypatch.setattr(torch.cuda, "cudart", lambda: self)
        monkeypatch.setattr(torch.cuda, "current_stream", self._stream)
        return self

    def cudaHostRegister(self, address, size, flags):
        assert flags == 0 and address not in self.locked
        self.did.append("register")
        self.locked.add(address)
        return 0

    def cudaHostUnregister(self, address):
        self.locked.remove(address)  # KeyError: CUDA has an error for that
        self.did.append("unregister")

    def _stream(self, device):
        return SimpleNamespace(synchronize=lambda: self.did.append(f"synchronize {device}"))
