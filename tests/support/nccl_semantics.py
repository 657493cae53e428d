"""A process group on the CPU with NCCL's documented semantics, so that what only gloo forgives fails in a test.

`World(backend=NCCL_SEMANTICS)` after `register()`; gloo carries the bytes. As torch documents ProcessGroupNCCL without
a `device_id`:

- the first operation of a communicator blocks the host until all its ranks have come. A group is one communicator for
  its collectives and for batched sends, and one more for each pair of ranks that sends without a batch;
- operations of one communicator run in the order in which a rank called them, one at a time, in both directions;
- nothing is complete at return: what arrives is not in the output before `wait`, until then filled with what no test
  takes for a result, and what is sent may not be written to before it;
- a send is complete when its receiver took it;
- an error shows at a later call or wait, and ends its communicator.

One thing is stricter: `wait` holds the host, where CUDA has only the stream wait.
"""

from __future__ import annotations

import ctypes
import queue
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

NCCL_SEMANTICS = "nccl_semantics"
PATIENCE = 60.0  # s until an operation that nobody joins is an error; tests that want the error ask for less
_POISON = 0xFF  # as bytes: NaN in every floating dtype, -1 in signed integers

# Runs in the communicator's thread; gives what arrived for each output.
Transfer = Callable[[dist.ProcessGroup], Sequence[Tensor]]

_batch_isend_irecv = dist.batch_isend_irecv


def register() -> None:
    """Makes the backend known to torch in this process."""
    if NCCL_SEMANTICS.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(NCCL_SEMANTICS, _create, devices=["cpu"])
        dist.batch_isend_irecv = _batch


def _create(store: dist.Store, rank: int, size: int, timeout: timedelta) -> NcclSemantics:
    return NcclSemantics(store, rank, size)


def _batch(operations: list[dist.P2POp]) -> list[dist.Work]:
    group = operations[0].group or dist.group.WORLD
    if isinstance(group, NcclSemantics):
        return [group.batch(operations)]
    return _batch_isend_irecv(operations)


class NcclSemantics(dist.ProcessGroup):
    """One rank's end of a group."""

    def __init__(self, store: dist.Store, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._store, self._own, self._ranks = store, rank, range(size)
        self._communicators: dict[str, _Communicator] = {}

    def getBackendName(self) -> str:
        return NCCL_SEMANTICS

    @property
    def group_name(self) -> str:
        return distributed_c10d._world.pg_names[self]

    @property
    def connected(self) -> set[str]:
        """The communicators of this rank that stand: "group", and "0-1" for that pair of ranks of the group."""
        return set(self._communicators)

    def all_to_all_single(self, output, input, output_sizes, input_sizes, opts=None) -> dist.Work:
        def rows(whole: Tensor, sizes: list[int]) -> list[int]:
            count = len(self._ranks)
            return list(sizes) if sizes else [len(whole) // count] * count

        def transfer(gloo: dist.ProcessGroup) -> list[Tensor]:
            arrived = torch.empty(output.nbytes, dtype=torch.uint8)
            receive, send = (
                [size * (whole[0].nbytes if len(whole) else 0) for size in rows(whole, sizes)]
                for whole, sizes in ((output, output_sizes), (input, input_sizes))
            )
            gloo.alltoall_base(arrived, sent, receive, send, dist.AllToAllOptions()).wait()
            return [arrived]

        sent = _bytes_of(input)
        return self._collective("all_to_all", [output], [input], transfer)

    alltoall_base = all_to_all_single

    def allgather(self, outputs, inputs, opts=None) -> dist.Work:
        (outputs,), (mine,) = outputs, inputs

        def transfer(gloo: dist.ProcessGroup) -> list[Tensor]:
            arrived = [torch.empty_like(sent) for _ in self._ranks]
            gloo.allgather([arrived], [sent]).wait()
            return arrived

        sent = _bytes_of(mine)
        return self._collective("all_gather", outputs, [mine], transfer)

    def all_gather_single(self, output, input, opts=None) -> dist.Work:
        return self.allgather([list(output.chunk(len(self._ranks)))], [input])

    _allgather_base = all_gather_single

    def broadcast(self, tensors, opts) -> dist.Work:
        (tensor,), root = tensors, opts.rootRank

        def transfer(gloo: dist.ProcessGroup) -> list[Tensor]:
            options = dist.BroadcastOptions()
            options.rootRank = root
            gloo.broadcast([sent], options).wait()
            return [sent]

        sent = _bytes_of(tensor)
        return self._collective(f"broadcast from {root}", [tensor], [], transfer)

    def allreduce(self, tensors, opts) -> dist.Work:
        (tensor,) = tensors

        def transfer(gloo: dist.ProcessGroup) -> list[Tensor]:
            gloo.allreduce([sent], opts).wait()
            return [_bytes_of(sent)]

        sent = tensor.clone()
        return self._collective("all_reduce", [tensor], [], transfer)

    def send(self, tensors, to, tag=0) -> dist.Work:
        (tensor,) = tensors
        sent = _bytes_of(tensor)

        def transfer(gloo: dist.ProcessGroup) -> list[Tensor]:
            gloo.send([sent], int(to > self._own), 0).wait()
            return []

        return self._pair(to).enqueue(f"send to {to}", [], [tensor], transfer)

    def recv(self, tensors, source, tag=0) -> dist.Work:
        (tensor,) = tensors
        arrived = _bytes_of(tensor)

        def transfer(gloo: dist.ProcessGroup) -> list[Tensor]:
            gloo.recv([arrived], int(source > self._own), 0).wait()
            return [arrived]

        return self._pair(source).enqueue(f"receive from {source}", [tensor], [], transfer)

    def batch(self, operations: list[dist.P2POp]) -> dist.Work:
        """All of them at once: one operation of the group's own communicator."""
        sends = [(o.tensor, o.group_peer) for o in operations if o.op is dist.isend]
        receives = [(o.tensor, o.group_peer) for o in operations if o.op is dist.irecv]
        sent = [_bytes_of(tensor) for tensor, _ in sends]
        arrived = [_bytes_of(tensor) for tensor, _ in receives]

        def transfer(gloo: dist.ProcessGroup) -> list[Tensor]:
            works = [gloo.recv([part], peer, 1) for part, (_, peer) in zip(arrived, receives, strict=True)]
            works += [gloo.send([part], peer, 1) for part, (_, peer) in zip(sent, sends, strict=True)]
            for work in works:
                work.wait()
            return arrived

        outputs, inputs = [tensor for tensor, _ in receives], [tensor for tensor, _ in sends]
        return self._whole().enqueue("batched sends and receives", outputs, inputs, transfer)

    def _collective(
        self, name: str, outputs: Sequence[Tensor], inputs: Sequence[Tensor], transfer: Transfer
    ) -> dist.Work:
        def checked(gloo: dist.ProcessGroup) -> Sequence[Tensor]:
            _check_same(gloo, name, len(self._ranks))
            return transfer(gloo)

        return self._whole().enqueue(name, outputs, inputs, checked)

    def _whole(self) -> _Communicator:
        return self._communicator("group", self._own, len(self._ranks))

    def _pair(self, other: int) -> _Communicator:
        low, high = sorted((self._own, other))
        return self._communicator(f"{low}-{high}", int(self._own > other), 2)

    def _communicator(self, name: str, rank: int, size: int) -> _Communicator:
        if name not in self._communicators:
            store = dist.PrefixStore(name, self._store)
            self._communicators[name] = _Communicator(name, store, rank, size)
        return self._communicators[name]


class _Communicator:
    """Blocks until all its ranks have made it; then does what they enqueue, one after the other."""

    def __init__(self, name: str, store: dist.Store, rank: int, size: int) -> None:
        patience = timedelta(seconds=PATIENCE)
        store.set_timeout(patience)
        self._name = name
        self.error: Exception | None = None
        try:
            self._gloo = dist.ProcessGroupGloo(store, rank, size, patience)
        except Exception as error:
            raise NcclError(f"nobody else came to make communicator {name}: {error}") from error
        self._waiting: queue.SimpleQueue[_Work] = queue.SimpleQueue()
        threading.Thread(target=self._work, daemon=True).start()

    def enqueue(
        self, name: str, outputs: Sequence[Tensor], inputs: Sequence[Tensor], transfer: Transfer
    ) -> _Work:
        if self.error is not None:
            raise self.error
        if not all(tensor.is_contiguous() for tensor in (*outputs, *inputs)):
            raise ValueError(f"{name}: tensors must be contiguous")
        work = _Work(f"{name} of communicator {self._name}", outputs, inputs, transfer)
        self._waiting.put(work)
        return work

    def _work(self) -> None:
        while True:
            work = self._waiting.get()
            try:
                if self.error is not None:
                    raise self.error
                work.arrived = work.transfer(self._gloo)
            except Exception as error:
                self.error = work.error = NcclError(f"{work.name}: {error}")
            work.done.set()


class NcclError(RuntimeError):
    """An operation failed, or nobody joined it."""


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
        # What lies in an output is overwritten on purpose, as FSDP's input does in its output.
        self._sent = [(t, _bytes_of(t)) for t in inputs if not any(_overlap(t, out) for out in outputs)]
        for output in outputs:
            ctypes.memset(output.data_ptr(), _POISON, output.nbytes)

    def wait(self, timeout: timedelta | None = None) -> bool:
        if not self.done.wait(PATIENCE):
            raise NcclError(f"{self.name} did not end")
        if self.error is not None:
            raise self.error
        for tensor, sent in self._sent:
            if not torch.equal(_bytes_of(tensor), sent):
                raise NcclError(f"{self.name}: what is sent was written to before the wait")
        for output, arrived in zip(self._outputs, self.arrived, strict=True):
            ctypes.memmove(output.data_ptr(), arrived.data_ptr(), output.nbytes)
        self._outputs, self.arrived, self._sent = [], (), []
        return True

    def is_completed(self) -> bool:
        return self.done.is_set()


def _bytes_of(tensor: Tensor) -> Tensor:
    """A copy of what a tensor holds, [nbytes] uint8."""
    return tensor.detach().clone().reshape(-1).view(torch.uint8)


def _overlap(one: Tensor, other: Tensor) -> bool:
    a, b = one.data_ptr(), other.data_ptr()
    return a < b + other.nbytes and b < a + one.nbytes


def _check_same(gloo: dist.ProcessGroup, name: str, size: int) -> None:
    """Raises NcclError where the ranks of a communicator came with different operations."""
    mine = torch.frombuffer(bytearray(name.encode().ljust(32)), dtype=torch.uint8)
    everyones = [torch.empty_like(mine) for _ in range(size)]
    gloo.allgather([everyones], [mine]).wait()
    names = [bytes(other.tolist()).decode().strip() for other in everyones]
    if len(set(names)) > 1:
        raise NcclError(f"the ranks came with {', '.join(names)}")
