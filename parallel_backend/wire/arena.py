"""Memory for the tensors of model calls that one process writes and others read, the same from call to call.

An arena is a memfd that cannot shrink, grow, or get a second writer, so that its pages are made once and not with every
call. Its descriptor comes with each message, and the message says where its tensors lie. Requests and answers take
turns: what is placed for one message may be overwritten as soon as the next one is.
"""

from __future__ import annotations

import ctypes
import logging
import math
import mmap
import os
from contextlib import suppress

import torch
from torch import Tensor

from ..errors import TransportError
from .buffer_pool import BufferPool
from .protocol import PlacedTensor
from .strict_json import shown
from .tensor_state import SeenTensor
from .transport import ALIGNMENT, DTYPES, MAX_PAYLOAD_BYTES, MAX_TENSORS, NAMES

# <linux/fcntl.h>; Python's fcntl is not on Windows, where this module must still import, and lacks the last one.
_SEAL_SEAL, _SEAL_SHRINK, _SEAL_GROW, _SEAL_FUTURE_WRITE = 1, 2, 4, 16
_KEEPS_ITS_SIZE = _SEAL_SEAL | _SEAL_SHRINK | _SEAL_GROW
_STEP = 1 << 20  # bytes by which arenas differ in size

log = logging.getLogger(__name__)


class ArenaWriter:
    """This process's arena. `descriptor` goes with each message that names tensors in it, and stays the writer's."""

    def __init__(self) -> None:
        self.descriptor = -1
        self._memory = torch.empty(0, dtype=torch.uint8)
        # Whether its pages are, for a GPU to write them itself; None: nobody has tried.
        self._locked: bool | None = None
        self._slots: list[_Slot] = []
        self.bytes_written = 0
        self._make_memory(0)  # of which nothing is taken before it is written

    def place(self, tensors: dict[str, Tensor]) -> tuple[PlacedTensor, ...]:
        """Writes `tensors` (any device, DTYPES), but those that lie there as they are."""
        size = sum(_aligned(tensor.nbytes) for tensor in tensors.values())
        if self.descriptor < 0 or size > len(self._memory):
            self._make_memory(size)
        places = self._find_places(tensors)
        if places is None:
            self._slots = []  # they are of other sizes: all are placed anew
            places = self._find_places(tensors)
            assert places is not None, "there is room for all of them"
        try:
            self._write_all(places)
        except BaseException:
            self._slots = []  # who knows what lies there
            raise
        return tuple(
            PlacedTensor(name, NAMES[tensor.dtype], tuple(tensor.shape), slot.offset)
            for (name, tensor), (slot, _) in zip(tensors.items(), places, strict=True)
        )

    def empty(self) -> None:
        """Gives its memory back but for a little, under the same descriptor."""
        self._make_memory(0)

    def release(self) -> None:
        """Gives its memory back, and the descriptor; the next call makes others."""
        self._unmap()
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def _unmap(self) -> None:
        if self._locked:
            torch.cuda.cudart().cudaHostUnregister(self._memory.data_ptr())
        self._memory, self._slots, self._locked = torch.empty(0, dtype=torch.uint8), [], None

    def _find_places(self, tensors: dict[str, Tensor]) -> list[tuple[_Slot, Tensor]] | None:
        """A slot for each: the one where it lies, or one of its size that this call does not need, or a new one; None
        where there is no room for that."""
        found: dict[str, _Slot] = {}
        for name, tensor in tensors.items():
            known = next((slot for slot in self._slots if slot.holds(tensor)), None)
            if known is not None:
                found[name] = known
        taken = set(map(id, found.values()))
        for name, tensor in tensors.items():
            if name in found:
                continue
            size = _aligned(tensor.nbytes)
            slot = next((one for one in self._slots if one.size == size and id(one) not in taken), None)
            if slot is None:
                end = max((one.offset + one.size for one in self._slots), default=0)
                if end + size > len(self._memory):
                    return None
                slot = _Slot(end, size)
                self._slots.append(slot)
            slot.seen = None
            taken.add(id(slot))
            found[name] = slot
        return [(found[name], tensor) for name, tensor in tensors.items()]

    def _write_all(self, places: list[tuple[_Slot, Tensor]]) -> None:
        devices: set[torch.device] = set()
        for slot, tensor in places:
            if not slot.holds(tensor):
                self._write(slot, tensor)
                devices.add(tensor.device)
        for device in devices:
            if device.type == "cuda":
                torch.cuda.current_stream(device).synchronize()

    def _write(self, slot: _Slot, tensor: Tensor) -> None:
        if tensor.device.type == "cuda" and self._locked is None:
            self._locked = _lock_pages(self._memory, tensor.device)
        place = _tensor_at(self._memory, slot.offset, tensor.dtype, tuple(tensor.shape))
        place.copy_(tensor.detach(), non_blocking=True)
        slot.seen = SeenTensor(tensor)
        self.bytes_written += tensor.nbytes

    def _make_memory(self, size: int) -> None:
        import fcntl

        self._unmap()
        size = (size * 9 // 8 // _STEP + 1) * _STEP  # some more: calls differ a little
        made = os.memfd_create("parallel-backend-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        if self.descriptor < 0:
            self.descriptor = made
        else:  # under the number of the one before
            os.dup2(made, self.descriptor, inheritable=False)
            os.close(made)
        try:
            os.ftruncate(self.descriptor, size)
            # The one writable mapping there will be: it was made before the seal.
            self._memory = _as_tensor(mmap.mmap(self.descriptor, size))
            fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, _KEEPS_ITS_SIZE | _SEAL_FUTURE_WRITE)
        except BaseException:
            self.release()
            raise


class ArenaReader:
    """The arena of the other end, as its messages name it."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._file: tuple[int, int] | None = None  # device and inode of what is mapped
        self._copies = BufferPool()

    def take(self, descriptor: int, placed: tuple[PlacedTensor, ...]) -> dict[str, Tensor]:
        """As `read`; the caller's own."""
        return {name: self._copies.copy(tensor) for name, tensor in self.read(descriptor, placed).items()}

    def read(self, descriptor: int, placed: tuple[PlacedTensor, ...]) -> dict[str, Tensor]:
        """The tensors, where they lie: read-only, and valid until this end has answered. `descriptor` stays the
        caller's. Raises TransportError for an arena that could shrink, and for tensors that do not lie in it."""
        status = os.fstat(descriptor)
        if self._file != (status.st_dev, status.st_ino):
            self._map(descriptor, status.st_size)
            self._file = (status.st_dev, status.st_ino)
        if len(placed) > MAX_TENSORS:
            raise TransportError(f"a message places {len(placed)} tensors; the limit is {MAX_TENSORS}")
        found = {tensor.name: self._tensor(tensor) for tensor in placed}
        if len(found) < len(placed):
            raise TransportError("a message places two tensors of one name")
        return found

    def release(self) -> None:
        """Gives up the mapping, once nothing that was read is used."""
        self._memory, self._file = torch.empty(0, dtype=torch.uint8), None
        self._copies.release()

    def _map(self, descriptor: int, size: int) -> None:
        import fcntl

        self.release()
        try:
            seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
        except OSError:
            raise TransportError("an arena is not a memfd") from None
        if seals & _KEEPS_ITS_SIZE != _KEEPS_ITS_SIZE:  # a mapping that shrinks kills who reads it
            raise TransportError("an arena is not sealed against another size")
        if not 0 < size <= MAX_PAYLOAD_BYTES:
            raise TransportError(f"an arena has {size} bytes; 1 to {MAX_PAYLOAD_BYTES} are allowed")
        # Without a descriptor of its own, which Python's mmap would keep. What this end wrote would be its own, and so
        # would a page be of which a driver has hold as for writing (ROCm's, to copy from it): later calls would find
        # the numbers of this one there.
        with torch.inference_mode(False):
            memory = torch.from_file(f"/proc/self/fd/{descriptor}", False, size, dtype=torch.uint8)
        address = ctypes.c_void_p(memory.data_ptr())
        if ctypes.CDLL(None).mprotect(address, ctypes.c_size_t(size), mmap.PROT_READ):
            raise TransportError("an arena cannot be made read-only")
        self._memory = memory

    def _tensor(self, placed: PlacedTensor) -> Tensor:
        dtype = DTYPES.get(placed.dtype)
        if dtype is None:
            raise TransportError(f"tensor {shown(placed.name)} has dtype {shown(placed.dtype)}")
        size = math.prod(placed.shape) * dtype.itemsize
        fits = min((*placed.shape, placed.offset), default=0) >= 0 and placed.offset % ALIGNMENT == 0
        if not fits or placed.offset + size > len(self._memory):
            raise TransportError(f"tensor {shown(placed.name)} does not lie in its arena")
        try:
            return _tensor_at(self._memory, placed.offset, dtype, placed.shape)
        except (RuntimeError, TypeError, ValueError, OverflowError) as error:
            raise TransportError(f"tensor {shown(placed.name)} cannot be read: {shown(error)}") from None


class _Slot:
    """A place in an arena, and the tensor that lies there, where its owner cannot have written into it unseen."""

    def __init__(self, offset: int, size: int) -> None:
        self.offset = offset
        self.size = size
        self.seen: SeenTensor | None = None

    def holds(self, tensor: Tensor) -> bool:
        return self.seen is not None and self.seen.is_still(tensor)


@torch.inference_mode(False)  # what is made under it could not be written outside of it
def _as_tensor(mapping: mmap.mmap) -> Tensor:
    return torch.frombuffer(mapping, dtype=torch.uint8)


def _tensor_at(memory: Tensor, offset: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    size = math.prod(shape) * dtype.itemsize
    return memory[offset : offset + size].view(dtype).view(shape)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _lock_pages(memory: Tensor, device: torch.device) -> bool:
    """Has a GPU write to `memory` itself and not by way of a buffer of the driver; False where it cannot."""
    code = torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)
    if int(code) == 0:
        return True
    log.info("parallel sampling: the memory of model calls stays pageable (%s)", code)
    with suppress(RuntimeError):  # the driver tells an error again with the next call, whichever that is
        torch.zeros(1, device=device).item()
    return False
