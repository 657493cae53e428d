"""A rank's device and the communicators whose operations it runs: the half of nccl_semantics.py that waits."""

from __future__ import annotations

import ctypes
import functools
import queue
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from host_and_device import active

PATIENCE = 60.0  # s until an operation that no other rank joins is an error; tests of this error set less
_POISON = 0xFF  # as bytes: NaN in every floating dtype, -1 in signed integers
# The dtypes of ProcessGroupNCCL with NCCL 2.24 or newer; older versions do not sum float8.
_DTYPES = (
    *(torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2),
)

# Runs in the device's thread and returns the received data for each output.
Transfer = Callable[[dist.ProcessGroup], Sequence[Tensor]]


_begun: list[_Work] = []  # operations that this rank has started and not yet waited for


def unwaited() -> list[str]:
    """Returns the names of operations, in any group, that this rank has started and not waited for."""
    return [work.name for work in _begun]


class Stream:
    """Runs one function at a time, in the order of the calls of `do`."""

    def __init__(self) -> None:
        self._owner = threading.get_ident()
        self._waiting: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        threading.Thread(target=self._run, daemon=True).start()

    def do(self, act: Callable[[], None]) -> None:
        if threading.get_ident() != self._owner:
            raise ValueError(
                "two threads of a rank begin operations, in an order that other ranks may not have"
            )
        self._waiting.put(act)

    def synchronize(self) -> None:
        idle = threading.Event()
        self.do(idle.set)
        if not idle.wait(PATIENCE):
            raise NcclError("a communicator is made while an operation waits for another rank")

    def _run(self) -> None:
        while True:
            self._waiting.get()()


@functools.cache
def only_stream() -> Stream:
    """Returns the stream of this rank's device. The first call must be in the rank: a fork does not copy its thread."""
    return Stream()


class Communicator:
    """A communicator: making it blocks until all its ranks do so; then it runs operations one after the other."""

    def __init__(self, name: str, store: dist.Store, rank: int, size: int, stream: Stream) -> None:
        patience = timedelta(seconds=PATIENCE)
        store.set_timeout(patience)
        self._name = name
        self.error: Exception | None = None
        self._stream = stream
        stream.synchronize()
        try:
            self._gloo = dist.ProcessGroupGloo(store, rank, size, patience)
        except Exception as error:
            raise NcclError(f"nobody else came to make communicator {name}: {error}") from error

    def enqueue(
        self, name: str, outputs: Sequence[Tensor], inputs: Sequence[Tensor], transfer: Transfer
    ) -> _Work:
        if self.error is not None:
            raise self.error
        for tensor in (*outputs, *inputs):
            _check(name, tensor)
        work = _Work(f"{name} of communicator {self._name}", outputs, inputs, transfer)
        self._stream.do(functools.partial(self._do, work))
        _begun.append(work)
        return work

    def _do(self, work: _Work) -> None:
        try:
            if self.error is not None:
                raise self.error
            work.arrived = work.transfer(self._gloo)
        except Exception as error:
            self.error = work.error = NcclError(f"{work.name}: {error}")
        work.done.set()


class NcclError(RuntimeError):
    """An operation failed, or no other rank joined it."""


class _Work(dist.Work):
    def __init__(
        self, name: str, outputs: Sequence[Tensor], inputs: Sequence[Tensor], transfer: Transfer
    ) -> None:
        super().__init__()
        self.name, self.transfer = name, transfer
        self.done = threading.Event()
        self.arrived: Sequence[Tensor] = ()
        self.error: Exception | None = None
        self._outputs = list(outputs)
        # An input inside an output is overwritten on purpose; FSDP places its input there.
        self._sent = [(t, _content(t)) for t in inputs if not any(overlap(t, out) for out in outputs)]
        for output in outputs:
            ctypes.memset(output.data_ptr(), _POISON, output.nbytes)

    def wait(self, timeout: timedelta | None = None) -> bool:
        _begun[:] = [work for work in _begun if work is not self]
        if not self.done.wait(PATIENCE):
            raise NcclError(f"{self.name} did not end")
        if self.error is not None:
            raise self.error
        for tensor, sent in self._sent:
            if _content(tensor) != sent:
                raise NcclError(f"{self.name}: what is sent was written to before the wait")
        for output, arrived in zip(self._outputs, self.arrived, strict=True):
            ctypes.memmove(output.data_ptr(), arrived.data_ptr(), output.nbytes)
        self._outputs, self.arrived, self._sent = [], (), []
        return True

    def is_completed(self) -> bool:
        return self.done.is_set()


def _check(name: str, tensor: Tensor) -> None:
    if not tensor.is_contiguous():
        raise ValueError(f"{name}: tensors must be contiguous")
    if tensor.dtype not in _DTYPES:
        raise ValueError(f"{name}: NCCL has no {tensor.dtype}")
    mode = active()
    if mode is not None and not mode.holds(tensor):
        raise ValueError(f"{name}: tensors must be on the device")


def bytes_of(tensor: Tensor) -> Tensor:
    """Returns a copy of a tensor's bytes, [nbytes] uint8."""
    return torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor).flatten().view(torch.uint8)


def _content(tensor: Tensor) -> bytes:
    """Returns the bytes of a contiguous tensor, which compare several times as fast as tensors."""
    return ctypes.string_at(tensor.data_ptr(), tensor.nbytes)


def overlap(one: Tensor, other: Tensor) -> bool:
    a, b = one.data_ptr(), other.data_ptr()
    return min(one.nbytes, other.nbytes) > 0 and a < b + other.nbytes and b < a + one.nbytes
