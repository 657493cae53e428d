"""Counts the work that a model call gives a GPU. The meta device stands for the GPU: no data, no arithmetic.

torch's dispatcher shows the launches. Attention counts as one operator; its result has the memory layout of its
queries, as FlashAttention's has. Collectives do nothing. If the host reads a device tensor, or waits for a copy to or
from the device, that counts as a synchronisation; a value that the host reads is 1. Calls that a GPU refuses raise
Refused: an operator over tensors of device and host, a product of two dtypes, a generator of another device, a
collective of devices over the host's tensors.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from meta_answers import meta_answer
from parallel_backend.engine.comm.groups import World

DEVICE = torch.device("meta")  # a GPU's stand-in
CPU = torch.device("cpu")
aten = torch.ops.aten
_PACK = str(Path(__file__).parents[2] / "parallel_backend")
_COMFYUI = "/comfy/"
_FAKE, _CONTROL = "cpu:fake,meta:fake", "for the host's flags"


class Refused(RuntimeError):
    """A call that a GPU would refuse."""


@dataclass(frozen=True)
class Counts:
    """The counted work. `operators`: kernels that a GPU would launch, without those of collectives; `copied_bytes`:
    written by copies that only move data (contiguous, cat, pad, clone, copy_); `host_syncs`: waits of the host for the
    device; `collectives`: started collectives and messages to one rank; `sent_bytes`: bytes passed to them."""

    operators: int = 0
    copied_bytes: int = 0
    host_syncs: int = 0
    collectives: int = 0
    sent_bytes: int = 0

    def __add__(self, other: Counts) -> Counts:
        return Counts(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def __sub__(self, other: Counts) -> Counts:
        return Counts(*(getattr(self, f.name) - getattr(other, f.name) for f in fields(self)))

    def as_dict(self) -> dict[str, int]:
        return asdict(self)


class DispatchCounter(TorchDispatchMode):
    """Counts while it is entered. `events`: launches in order, by names like `aten.cat` and `c10d.alltoall_base_`;
    `own_syncs`: the lines of the pack that made the host wait. `device`: only work on this device counts."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device
        self.counts = Counts()
        self.events: list[str] = []
        self.own_syncs: list[str] = []

    def synced(self, name: str) -> None:
        self._add(f"sync {name}", Counts(host_syncs=1))
        line = _line_of_pack()
        if line:
            self.own_syncs.append(f"{line}: {name}")

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        packet, name = func.overloadpacket, str(func.overloadpacket)
        if func.namespace in ("c10d", "_c10d_functional"):
            return self._collective(func, name, args, kwargs)
        if packet is aten.scaled_dot_product_attention and self.device == DEVICE:
            self._refuse_mixed(packet, name, args)
            self._add(name, Counts(operators=1))
            return _attention(*args[:3])
        if packet is aten.dropout and not args[2]:
            return args[0]  # torch's kernel also returns its input
        if packet in _READS:
            return self._read(func, packet, name, args, kwargs)
        if (
            packet in (aten._to_copy, aten.copy_)
            and (answer := self._moved(func, name, args, kwargs)) is not None
        ):
            return answer
        if packet not in _WHOLE and _can_decompose(func):
            with torch._C.DisableTorchFunction(), self:
                answer = func.decompose(*args, **kwargs)
            if answer is not NotImplemented:
                return answer
        if packet in _INDEXING:
            args = self._indexed(packet, name, args)
        else:
            self._refuse_mixed(packet, name, (args, list(kwargs.values())))
        answer = meta_answer(func, args, kwargs) if self.device == DEVICE else func(*args, **kwargs)
        if self._launches(func, packet, answer):
            self._add(name, Counts(operators=1, copied_bytes=_bytes(answer) if packet in _COPIES else 0))
        return answer

    def _add(self, event: str, counts: Counts) -> None:
        self.events.append(event)
        self.counts += counts

    def _launches(self, func: Any, packet: Any, answer: Any) -> bool:
        if packet in _NOTHING or func.namespace == "prim":
            return False
        if _is_view(func):
            return False
        return any(tensor.device.type == self.device.type and tensor.numel() for tensor in _tensors(answer))

    def _refuse_mixed(self, packet: Any, name: str, given: Any) -> None:
        """Raises Refused for a product of two dtypes, or host tensors with dimensions among device tensors."""
        if self.device == CPU:
            return
        tensors = list(_tensors(given))
        if len({t.device.type for t in tensors if t.ndim or t.device.type != CPU.type}) > 1:
            raise Refused(f"{name} over tensors of the device and of the host")
        if packet in _OF_ONE_DTYPE and len({t.dtype for t in tensors if t.is_floating_point()}) > 1:
            raise Refused(f"{name} over tensors of two dtypes")

    def _indexed(self, packet: Any, name: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Returns the arguments with indices in place of masks, as if a mask was True everywhere."""
        indexed, indices, *values = args
        if indexed.device.type != self.device.type or self.device == CPU:
            return args
        self._refuse_mixed(packet, name, (indexed, values))
        places: list[Tensor | None] = []
        for index in indices:
            if index is None:
                places.append(None)
                continue
            is_mask = index.dtype in (torch.bool, torch.uint8)
            is_fill = is_mask and len(indices) == 1 and bool(values) and not values[0].ndim
            if (is_mask and not is_fill) or index.device != indexed.device:
                self.synced(f"{name} by {'a mask' if is_mask else 'an index of the host'}")
            one = torch.empty(
                index.numel() if is_mask else index.shape, dtype=torch.long, device=indexed.device
            )
            places += [one] * (index.ndim if is_mask else 1)
        return (indexed, places, *values)

    def _collective(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not _is_control(args) and any(t.device.type != self.device.type for t in _tensors(args)):
            raise Refused(f"{name} of the devices over tensors of the host")
        short = name.rpartition(".")[2]
        if short in _COLLECTIVES:
            given = args[_COLLECTIVES[short]]
            self._add(name, Counts(collectives=1, sent_bytes=_bytes(given)))
        return func(*args, **kwargs)

    def _read(self, func: Any, packet: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not any(tensor.device.type == self.device.type for tensor in args if isinstance(tensor, Tensor)):
            return func(*args, **kwargs)
        self.synced(name)
        if packet in (aten.is_nonzero, aten.equal):
            return True
        if packet in (aten.masked_select, aten.bincount):
            return args[0].new_empty(
                args[0].numel(), dtype=None if packet is aten.masked_select else torch.long
            )
        return args[0].new_empty(1, args[0].ndim, dtype=torch.long) if packet is aten.nonzero else 1

    def _moved(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
        """Returns the result of a copy between host and device, or None for a copy within one of them."""
        if func.overloadpacket is aten.copy_:
            to, source = args[0], args[1]
            waits = not (args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
            target = to.device
        else:
            source, waits = args[0], not kwargs.get("non_blocking", False)
            target = kwargs.get("device") or source.device
        if torch.device(target).type == source.device.type:
            return None
        if waits:
            self.synced(name)
        else:
            self._add(name, Counts(operators=1))
        if func.overloadpacket is aten.copy_:
            return to
        return torch.ones(source.shape, dtype=kwargs.get("dtype") or source.dtype, device=target)


class _PythonReads(TorchFunctionMode):
    """Counts waits that the dispatcher never sees: device tensors made of Python's numbers, and lists as indices."""

    def __init__(self, counter: DispatchCounter) -> None:
        super().__init__()
        self._counter = counter

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        device = torch.device(kwargs.get("device") or "cpu")
        generator = kwargs.get("generator")
        if generator is not None and "device" in kwargs and device.type != _device_type(generator):
            raise Refused(f"numbers on {device} from a generator of {_device_type(generator)}")
        of_numbers = func in (torch.tensor, torch.as_tensor, torch.asarray) and not isinstance(
            args[0], Tensor
        )
        if func is Tensor.new_tensor:
            of_numbers, device = True, args[0].device
        if of_numbers and device == self._counter.device != CPU:
            self._counter.synced("torch.tensor")
        if func in (Tensor.__getitem__, Tensor.__setitem__) and args[0].device == self._counter.device:
            places = args[1] if isinstance(args[1], tuple) else (args[1],)
            if any(isinstance(place, list) for place in places):
                self._counter.synced("a list as index")
        return func(*args, **kwargs)


# Operators that read a tensor's values on the host.
_READS = {
    aten._local_scalar_dense,
    aten.item,
    aten.is_nonzero,
    aten.equal,
    aten.nonzero,
    aten.masked_select,
    aten.bincount,
}
_INDEXING = {aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_}
# CUDA's kernels refuse operands of several dtypes here; those of the meta device do not check.
_OF_ONE_DTYPE = {
    aten.mm,
    aten.addmm,
    aten.bmm,
    aten.baddbmm,
    aten.convolution,
    aten.native_layer_norm,
    aten.native_group_norm,
    aten.scaled_dot_product_attention,
    aten.index_put,
    aten.index_put_,
}
_COPIES = {
    aten.clone,
    aten.cat,
    aten.copy_,
    aten.constant_pad_nd,
    aten.index_select,
    aten.index,
    aten.stack,
}
# Launched as one kernel, though torch could decompose them.
_WHOLE = {aten.stack, aten.native_layer_norm, aten.rms_norm, aten.gelu, aten.silu, aten.index_select}
_NOTHING = {
    aten.empty,
    aten.empty_like,
    aten.empty_strided,
    aten.new_empty,
    aten.new_empty_strided,
    aten._unsafe_view,
    aten._reshape_alias,
    aten.lift_fresh,
    aten.detach,
    aten.set_,
    aten.resize_,
}
# Collectives that send a tensor, and the index of that tensor among their arguments.
_COLLECTIVES = {
    "alltoall_base_": 1,
    "alltoall_": 1,
    "allgather_": 1,
    "_allgather_base_": 1,
    "allreduce_": 0,
    "broadcast_": 0,
    "reduce_scatter_": 1,
    "_reduce_scatter_base_": 1,
    "send": 0,
    "all_to_all_single": 0,
    "all_gather_into_tensor": 0,
    "all_reduce": 0,
    "reduce_scatter_tensor": 0,
}


@functools.cache
def _can_decompose(func: Any) -> bool:
    return func._can_decompose()


@functools.cache
def _is_view(func: Any) -> bool:
    return any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)


def _attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    if query.shape[-1] == value.shape[-1]:
        return torch.empty_like(query)
    return query.new_empty(*query.shape[:-1], value.shape[-1])


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)


def _bytes(value: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in _tensors(value))


class _HostGenerator(torch.Generator):
    """A generator of the host that stands for a generator of `device`."""

    stands_for: torch.device

    def __new__(cls, device: torch.device | str = CPU) -> _HostGenerator:
        made = super().__new__(cls)
        made.stands_for = torch.device(device)
        return made


def _device_type(generator: torch.Generator) -> str:
    return getattr(generator, "stands_for", generator.device).type


def _is_control(args: tuple[Any, ...]) -> bool:
    """Returns True if a collective uses a group for the host's flags."""
    groups = (a for a in args if isinstance(a, torch.ScriptObject) and a._type().name() == "ProcessGroup")
    return any(dist.ProcessGroup.unbox(group).group_desc == _CONTROL for group in groups)


def _line_of_pack() -> str:
    """Returns the innermost line of the pack on the stack, or "" if a line of ComfyUI is further inside."""
    frame = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename
        if path.startswith(_PACK):
            return f"{path.removeprefix(_PACK)[1:]}:{frame.f_lineno}"
        if _COMFYUI in path:
            return ""
        frame = frame.f_back
    return ""


@contextmanager
def counted(device: torch.device = DEVICE) -> Iterator[DispatchCounter]:
    """Yields a counter of the work on `device` inside the block."""
    counter = DispatchCounter(device)
    with _PythonReads(counter), counter:
        yield counter


@contextmanager
def world_of_one_process(rank: int, world_size: int, device: torch.device = DEVICE) -> Iterator[World]:
    """Yields the World of a rank whose collectives do nothing. Its groups take only tensors of `device`."""
    dist.init_process_group(_FAKE, store=FakeStore(), rank=rank, world_size=world_size)
    try:
        world = World.__new__(World)
        world.rank, world.world_size, world.device = rank, world_size, device
        world.devices = (device,) * world_size
        world.group = dist.group.WORLD if world_size > 1 else None
        world.control = dist.new_group(backend=_FAKE, group_desc=_CONTROL) if world_size > 1 else None
        # torch has no generator for the meta device; no number is drawn from this one.
        with patch.object(torch, "Generator", _HostGenerator):
            yield world
    finally:
        dist.destroy_process_group()
