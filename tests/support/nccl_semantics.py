"""A process group on the CPU with NCCL's documented semantics. Errors that gloo tolerates fail in a test.

Use `World(backend=NCCL_SEMANTICS)` after `register()`; gloo carries the bytes. torch documents for ProcessGroupNCCL
without a `device_id`:

- the first operation of a communicator blocks the host until all its ranks have joined. A group has one communicator
  for its collectives and batched sends, and one more for each pair of ranks that sends without a batch;
- operations of one communicator run in the order in which a rank called them, one at a time, in both directions;
- an operation is not complete when its call returns. The output has no result before `wait`; until then it is filled
  with values that no test accepts. The input must not be written to before `wait`;
- a send is complete when its receiver has received it;
- all ranks pass a collective the same sizes and dtypes, and a send has those of its receive;
- tensors are dense and contiguous, have a dtype of NCCL, and do not overlap. Exceptions: a sum or a broadcast is in
  place, and the input of a gather may lie at the place of this rank's share in the output;
- an error shows at a later call or wait, and ends its communicator.

Where NCCL leaves a behaviour open, the strictest one holds here, so that no machine is stricter. A rank's device runs
the operations of *all* its communicators one at a time, in the order of the rank's calls: NCCL's guide demands the same
order on all ranks, since a kernel that waits for its peer may keep the next one from starting. Making a communicator
waits for the device, as allocating its memory may. `wait` blocks the host; with CUDA only the stream waits.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from itertools import combinations, product
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from nccl_device import Communicator, NcclError, Stream, bytes_of, only_stream, overlap

NCCL_SEMANTICS = "nccl_semantics"
NCCL_STREAMS = "nccl_streams"  # with a stream for each communicator; streams run at the same time
_NOTE = 256  # bytes of the message with which ranks compare their operations

_batch_isend_irecv = dist.batch_isend_irecv


def register() -> None:
    """Registers the backend with torch in this process."""
    if dist.batch_isend_irecv is not _batch:
        dist.Backend.register_backend(NCCL_SEMANTICS, partial(_create, only_stream), devices=["cpu"])
        dist.Backend.register_backend(NCCL_STREAMS, partial(_create, Stream), devices=["cpu"])
        dist.batch_isend_irecv = _batch


def count_connected() -> int:
    """Returns the number of communicators that this rank has made, in all its groups."""
    groups = distributed_c10d._world.pg_names
    return sum(len(group.connected) for group in groups if isinstance(group, NcclSemantics))


def _create(
    stream: Callable[[], Stream], store: dist.Store, rank: int, size: int, timeout: timedelta
) -> NcclSemantics:
    return NcclSemantics(stream, store, rank, size)


def _batch(operations: list[dist.P2POp]) -> list[dist.Work]:
    group = operations[0].group or dist.group.WORLD
    if isinstance(group, NcclSemantics):
        return [group.batch(operations)]
    return _batch_isend_irecv(operations)


class NcclSemantics(dist.ProcessGroup):
    """One rank's end of a group. `stream`: gives the stream for a new communicator."""

    def __init__(self, stream: Callable[[], Stream], store: dist.Store, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._stream = stream
        self._store, self._own, self._ranks = store, rank, range(size)
        self._communicators: dict[str, Communicator] = {}

    def getBackendName(self) -> str:
        return NCCL_SEMANTICS

    @property
    def group_name(self) -> str:
        return distributed_c10d._world.pg_names[self]

    @property
    def connected(self) -> set[str]:
        """Names of this rank's communicators: "group", and for example "0-1" for a pair of ranks of the group."""
        return set(self._communicators)

    def all_to_all_single(self, output, input, output_sizes, input_sizes, opts=None) -> dist.Work:
        receive, send = self._split(output, output_sizes), self._split(input, input_sizes)
        _check_apart("all_to_all", [output], [input])

        def transfer(gloo: dist.ProcessGroup, sent_by: Sequence[list[int]]) -> list[Tensor]:
            arrived = torch.empty(output.nbytes, dtype=torch.uint8)
            sent_to_me = [sizes[self._own] for sizes in sent_by]
            if sent_to_me != receive:
                raise NcclError(f"{receive} bytes are expected where {sent_to_me} are sent")
            gloo.alltoall_base(arrived, sent, receive, send, dist.AllToAllOptions()).wait()
            return [arrived]

        sent = bytes_of(input)
        return self._collective(f"all_to_all of {input.dtype}", [output], [input], transfer, send)

    alltoall_base = all_to_all_single

    def _split(self, whole: Tensor, sizes: Sequence[int]) -> list[int]:
        """Returns the bytes for each rank."""
        count = len(self._ranks)
        if sizes and (len(sizes) != count or sum(sizes) != len(whole)):
            raise ValueError(f"all_to_all: {list(sizes)} is no split of {len(whole)} rows over {count} ranks")
        if not sizes and len(whole) % count:
            raise ValueError(f"all_to_all: {len(whole)} rows do not divide by {count} ranks")
        row = whole[0].nbytes if len(whole) else 0
        return [size * row for size in sizes] if sizes else [len(whole) // count * row] * count

    def allgather(self, outputs, inputs, opts=None) -> dist.Work:
        (outputs,), (mine,) = outputs, inputs
        if [output.nbytes for output in outputs] != [mine.nbytes] * len(self._ranks):
            raise ValueError(f"all_gather: outputs are of another size than the input's {mine.nbytes} bytes")
        in_place = mine.data_ptr() == outputs[self._own].data_ptr()
        _check_apart("all_gather", outputs, [] if in_place else [mine])

        def transfer(gloo: dist.ProcessGroup, _: Any) -> list[Tensor]:
            arrived = [torch.empty_like(sent) for _ in self._ranks]
            gloo.allgather([arrived], [sent]).wait()
            return arrived

        sent = bytes_of(mine)
        return self._collective(f"all_gather of {_form(mine)}", outputs, [mine], transfer)

    def all_gather_single(self, output, input, opts=None) -> dist.Work:
        return self.allgather([list(output.chunk(len(self._ranks)))], [input])

    _allgather_base = all_gather_single

    def broadcast(self, tensors, opts) -> dist.Work:
        (tensor,), root = tensors, opts.rootRank

        def transfer(gloo: dist.ProcessGroup, _: Any) -> list[Tensor]:
            options = dist.BroadcastOptions()
            options.rootRank = root
            gloo.broadcast([sent], options).wait()
            return [sent]

        sent = bytes_of(tensor)
        return self._collective(f"broadcast from {root} of {_form(tensor)}", [tensor], [], transfer)

    def allreduce(self, tensors, opts) -> dist.Work:
        (tensor,) = tensors

        def transfer(gloo: dist.ProcessGroup, _: Any) -> list[Tensor]:
            gloo.allreduce([sent], opts).wait()
            return [bytes_of(sent)]

        sent = tensor.clone()
        return self._collective(f"all_reduce of {_form(tensor)}", [tensor], [], transfer)

    def send(self, tensors, to, tag=0) -> dist.Work:
        (tensor,) = tensors
        sent = bytes_of(tensor)

        def transfer(gloo: dist.ProcessGroup) -> list[Tensor]:
            for work in _begin_send(gloo, _form(tensor), sent, int(to > self._own), tag=0):
                work.wait()
            return []

        return self._pair(to).enqueue(f"send to {to}", [], [tensor], transfer)

    def recv(self, tensors, source, tag=0) -> dist.Work:
        (tensor,) = tensors
        arrived = bytes_of(tensor)

        def transfer(gloo: dist.ProcessGroup) -> list[Tensor]:
            _begin_receive(gloo, _form(tensor), arrived, int(source > self._own), tag=0)()
            return [arrived]

        return self._pair(source).enqueue(f"receive from {source}", [tensor], [], transfer)

    def batch(self, operations: list[dist.P2POp]) -> dist.Work:
        """Starts all of them at once, as one operation of the group's communicator."""
        sends = [(o.tensor, o.group_peer) for o in operations if o.op is dist.isend]
        receives = [(o.tensor, o.group_peer) for o in operations if o.op is dist.irecv]
        sent = [bytes_of(tensor) for tensor, _ in sends]
        arrived = [bytes_of(tensor) for tensor, _ in receives]
        outputs, inputs = [tensor for tensor, _ in receives], [tensor for tensor, _ in sends]
        _check_apart("a batch of sends and receives", outputs, inputs)

        def transfer(gloo: dist.ProcessGroup) -> list[Tensor]:
            leaving = []
            for part, (tensor, peer) in zip(sent, sends, strict=True):
                leaving += _begin_send(gloo, _form(tensor), part, peer, tag=1)
            coming = [
                _begin_receive(gloo, _form(tensor), part, peer, tag=1)
                for part, (tensor, peer) in zip(arrived, receives, strict=True)
            ]
            try:
                for take in coming:
                    take()
            finally:  # a send that is dropped leaves its receiver waiting
                for work in leaving:
                    work.wait()
            return arrived

        return self._whole().enqueue("batched sends and receives", outputs, inputs, transfer)

    def _collective(
        self,
        name: str,
        outputs: Sequence[Tensor],
        inputs: Sequence[Tensor],
        transfer: Callable[[dist.ProcessGroup, Sequence[Any]], Sequence[Tensor]],
        told: Any = None,
    ) -> dist.Work:
        """Starts a collective. `transfer` gets the value `told` of each rank."""

        def checked(gloo: dist.ProcessGroup) -> Sequence[Tensor]:
            names, everyones = zip(*_everyones(gloo, [name, told]), strict=True)
            if len(set(names)) > 1:
                raise NcclError(f"the ranks came with {', '.join(names)}")
            return transfer(gloo, everyones)

        return self._whole().enqueue(name, outputs, inputs, checked)

    def _whole(self) -> Communicator:
        return self._communicator("group", self._own, len(self._ranks))

    def _pair(self, other: int) -> Communicator:
        low, high = sorted((self._own, other))
        return self._communicator(f"{low}-{high}", int(self._own > other), 2)

    def _communicator(self, name: str, rank: int, size: int) -> Communicator:
        if name not in self._communicators:
            store = dist.PrefixStore(name, self._store)
            self._communicators[name] = Communicator(name, store, rank, size, self._stream())
        return self._communicators[name]


def _check_apart(name: str, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
    if any(overlap(*both) for both in (*combinations(outputs, 2), *product(outputs, inputs))):
        raise ValueError(f"{name}: what arrives would lie where something else does")


def _form(tensor: Tensor) -> str:
    return f"{tensor.nbytes} bytes of {tensor.dtype}"


def _note(value: Any = None) -> Tensor:
    """Returns the value as JSON text, [_NOTE] uint8."""
    return torch.frombuffer(bytearray(json.dumps(value).encode().ljust(_NOTE)), dtype=torch.uint8)


def _noted(note: Tensor) -> Any:
    return json.loads(note.numpy().tobytes())


def _everyones(gloo: dist.ProcessGroup, value: Any) -> list[Any]:
    """Returns the value of each rank of a communicator."""
    notes = [_note() for _ in range(gloo.size())]
    gloo.allgather([notes], [_note(value)]).wait()
    return [_noted(note) for note in notes]


def _begin_send(gloo: dist.ProcessGroup, form: str, sent: Tensor, peer: int, tag: int) -> list[dist.Work]:
    return [gloo.send([_note([form, sent.nbytes])], peer, tag), gloo.send([sent], peer, tag)]


def _begin_receive(
    gloo: dist.ProcessGroup, form: str, arrived: Tensor, peer: int, tag: int
) -> Callable[[], None]:
    """Starts a receive and returns a function that waits for it."""
    note = _note()
    noted = gloo.recv([note], peer, tag)

    def wait() -> None:
        noted.wait()
        theirs, size = _noted(note)
        # Gloo ends the process if sizes differ.
        taken = arrived if size == arrived.nbytes else torch.empty(size, dtype=torch.uint8)
        gloo.recv([taken], peer, tag).wait()
        if theirs != form:
            raise NcclError(f"{form} are expected where {theirs} are sent")

    return wait
