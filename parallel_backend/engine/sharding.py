"""Weights sharded over ranks as bytes, for any dtype, also packed and quantised tensors; gathered when a block runs.

Each block is one part, and everything around the blocks is one more. A part is one run of bytes, of which each rank
keeps an equal share. A part is whole while it computes. Meanwhile the next one is gathered, in the order of the last
call. Ranks that share weights must make the same calls at the same time, also ranks without rows. Code that reads a
weight while its part is not gathered gets an error: otherwise it would compute with wrong numbers unnoticed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import FunctionType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..errors import RequestError
from ..models.staging import as_built, component_tensors
from ..wire.heartbeat import heartbeat
from .comm.collectives import all_gather_single
from .comm.groups import Axis, is_gloo

_BYTES = torch.uint8
# Bytes: tensors begin at multiples of it in a gathered part. Kernels need 16; torch's allocator gives 512 on a device
# and 64 on a host.
_ALIGNMENT = 512
# Methods of networks that ComfyUI calls before it calls the network (MiniMax-H3 refines its prompts so).
_BEFORE_CALLS = ("preprocess_text_embeds",)
_LAYERS = ("torch.", "comfy.ops", "builtins")  # modules that define the layers inside blocks
# Functions that code may call on a weight that is not gathered.
_KNOWN_OF_ABSENT = {
    "__get__",
    "__len__",
    "__hash__",
    "__repr__",
    "__set__",
    "_has_compatible_shallow_copy_type",
    "data_ptr",
    "dim",
    "element_size",
    "is_complex",
    "is_contiguous",
    "is_floating_point",
    "is_inference",
    "is_pinned",
    "ndimension",
    "nelement",
    "numel",
    "requires_grad_",
    "size",
    "storage_offset",
    "stride",
    "untyped_storage",
}

Owners = list[tuple[nn.Module, str]]  # modules that hold a parameter, with its name in each


class AbsentWeight(nn.Parameter):
    """A stand-in for a weight that is not gathered: it has shape, dtype and device, but one number in memory."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Answers calls that do not need the numbers. Raises RequestError for calls that would read them."""
        name = getattr(func, "__name__", "")
        if name in ("detach", "clone"):  # called to list all weights, and by layers of ComfyUI that move
            return args[0]
        with torch._C.DisableTorchFunctionSubclass():
            if name in _KNOWN_OF_ABSENT:
                return func(*args, **(kwargs or {}))
            if name == "to":  # a moved module: its one number moves
                absent, *where = args
                number = torch.empty((), dtype=absent.dtype, device=absent.device)
                moved = func(number, *where, **(kwargs or {}))
                return absent if moved is number else moved.expand(absent.shape).as_subclass(cls)
        raise RequestError(
            "A weight is read outside of its block's turn, and weights are shared out block by block. Set "
            "shard_weights off, or leave out the node that reads it."
        )


class ByteSharding:
    """A base.WeightSharding of a module over `axis`. `offload`: a device's shares lie in pinned host memory; `shares`:
    the shards that this rank stores, as parameters."""

    def __init__(self, axis: Axis, device: torch.device, *, offload: bool) -> None:
        self._axis = axis
        self._device = device
        self._host = offload and device.type != "cpu"
        self.shares = nn.ParameterList()
        self._parts: list[_Part] = []
        self._around: _Part | None = None
        self._order: list[_Part] = []  # blocks in the order in which the previous call gathered them
        self._taken: list[_Part] = []  # blocks that this call has gathered so far
        self._ahead: tuple[_Part, Callable[[], Tensor]] | None = None
        self._rests = False  # True if the rest of this call gathers no more blocks

    @torch.inference_mode(False)
    @torch.no_grad()
    def shard(
        self, module: nn.Module, blocks: Sequence[nn.Module], dtypes: Mapping[str, torch.dtype]
    ) -> None:
        """Replaces the parameters of a module in host memory by this rank's share of them. Buffers stay unchanged.
        `dtypes`: by name, the dtype of each parameter that shall not keep its dtype.

        A block is a module that is called through its `forward` or another method. If one of `blocks` has neither, its
        children are the blocks. A parameter that several blocks hold belongs to the part around the blocks.
        """
        owner_of: dict[int, nn.Module] = {}
        for block in _called(blocks):
            for parameter in block.parameters():
                several = owner_of.get(id(parameter), block) is not block
                owner_of[id(parameter)] = module if several else block
        found: dict[nn.Module, dict[str, nn.Parameter]] = {}
        for name, parameter in module.named_parameters():
            found.setdefault(owner_of.get(id(parameter), module), {})[name] = parameter
        places: dict[int, Owners] = {}
        for owner in module.modules():
            for name, parameter in owner.named_parameters(recurse=False, remove_duplicate=False):
                places.setdefault(id(parameter), []).append((owner, name))
        for whole, parameters in found.items():
            part = _Part(
                {
                    name: (as_built(parameter, dtypes.get(name)), places[id(parameter)])
                    for name, parameter in parameters.items()
                },
                self._axis,
                self._device,
                pinned=self._host,
            )
            self.shares.append(part.share)
            self._parts.append(part)
            if whole is module:
                self._around = part
            else:
                whole.register_forward_pre_hook(partial(self._enter, part))
                whole.register_forward_hook(partial(self._leave, part), always_call=True)
                for name in _other_methods(whole):
                    setattr(whole, name, partial(self._run, part, whole, name))
        for name in _BEFORE_CALLS:
            if hasattr(type(module), name):
                setattr(module, name, partial(self._run_before_calls, module, name))

    @contextmanager
    def call(self) -> Iterator[None]:
        """Wraps each call of the module: gathers the part around the blocks; hooks gather the blocks."""
        self._taken, self._rests = [], False
        try:
            with self._around_gathered():
                self._look_ahead()
                yield
                self._order = self._order if self._rests else self._taken
        finally:
            self._drop_ahead()

    @contextmanager
    def _around_gathered(self) -> Iterator[None]:
        """Holds the weights around the blocks within this context; inside another such one it changes nothing."""
        part = self._around
        if part is None or part.turns:
            yield
            return
        part.turns += 1
        try:
            part.fill(self._start(part)())
            yield
        finally:
            part.turns -= 1
            part.drop()

    def show_shapes(self, shapes: Mapping[str, Sequence[int]]) -> None:
        """Sets the shapes that parameters show while they are not gathered, by name in the module: a patch that is
        applied on use may make a weight larger. All others show the shapes that they have."""
        for part in self._parts:
            part.show_shapes(shapes)

    def keeps(self, name: str) -> bool:
        """Returns True if this rank's share has a part of a parameter, by its name in the module."""
        return self._part_of(name).keeps(name)

    def put(self, name: str, value: Tensor) -> None:
        """Stores another value of a parameter, of the same dtype and shape, in this rank's share."""
        self._part_of(name).put(name, value)

    def _part_of(self, name: str) -> _Part:
        return next(part for part in self._parts if part.has(name))

    def rest(self) -> None:
        """Tells that no further block of this call computes. All ranks call it at the same block."""
        self._rests = True

    def _run(self, part: _Part, block: nn.Module, name: str, *args: Any, **kwargs: Any) -> Any:
        """Calls a block's method other than `forward` with its weights gathered (Wan-Animate 2 has one for poses)."""
        try:
            self._enter(part)
            return getattr(type(block), name)(block, *args, **kwargs)  # a pack may have replaced the class's
        finally:
            self._leave(part)

    def _run_before_calls(self, module: nn.Module, name: str, *args: Any, **kwargs: Any) -> Any:
        """Calls a method of the module, on all ranks, with the weights around its blocks."""
        with self._around_gathered():
            return getattr(type(module), name)(module, *args, **kwargs)

    def _enter(self, part: _Part, *module_and_inputs: object) -> None:
        part.turns += 1
        if part.turns > 1 or self._rests:
            return
        if self._ahead is not None and self._ahead[0] is part:
            arrive, self._ahead = self._ahead[1], None
        else:
            self._drop_ahead()  # the order has changed
            arrive = self._start(part)
        part.fill(arrive())
        self._taken.append(part)
        self._look_ahead()

    def _leave(self, part: _Part, *module_inputs_and_output: object) -> None:
        part.turns -= 1
        if not part.turns:
            part.drop()

    def _look_ahead(self) -> None:
        """Starts to gather the next block, if this call has had the same blocks as the previous one so far."""
        count = len(self._taken)
        if count < len(self._order) and self._taken == self._order[:count]:
            following = self._order[count]
            self._ahead = (following, self._start(following))

    def _drop_ahead(self) -> None:
        if self._ahead is not None:
            self._ahead[1]()
            self._ahead = None

    def _start(self, part: _Part) -> Callable[[], Tensor]:
        """Starts to gather a part; returns a function that waits for its bytes."""
        axis, mine = self._axis, part.share.to(self._device, non_blocking=True)
        if axis.group is None:
            return partial(self._arrived, mine, [], mine)
        whole = torch.empty(axis.size * mine.numel(), dtype=_BYTES, device=self._device)
        axis.traffic.add(mine.numel() * (axis.size - 1), mine)
        if not is_gloo(axis, self._device):
            work = all_gather_single(whole, mine, group=axis.group, async_op=True)
            return partial(self._arrived, whole, [work], mine)
        # Shares go straight to `whole`: gloo's own all-gather fills a buffer first, whose memory its thread keeps.
        shares, works = whole.chunk(axis.size), list[dist.Work | None]()
        shares[axis.index].copy_(mine)
        for peer in ((axis.index + hop) % axis.size for hop in range(1, axis.size)):
            works.append(dist.irecv(shares[peer], axis.ranks[peer], group=axis.group))
            works.append(dist.isend(mine, axis.ranks[peer], group=axis.group))
        return partial(self._arrived, whole, works, mine)

    def _arrived(self, whole: Tensor, works: list[dist.Work | None], sent: Tensor) -> Tensor:
        """Waits until `whole` is complete and returns it. `sent`: this rank's share, in use until then."""
        with heartbeat.inside("a gather of weights", self._axis.ranks):
            for work in filter(None, works):
                work.wait()
        return whole


@dataclass
class _Shared:
    """A parameter of a part: its owners, and the plain tensors that it consists of (dtype, shape, first byte).

    `absent` takes its place while the part is not gathered: code may ask for its shape, dtype and device. `number`: its
    one number in memory.
    """

    owners: Owners
    pieces: list[tuple[torch.dtype, torch.Size, int]]
    assemble_tensor: Callable[[Sequence[Tensor]], Tensor]
    shape: torch.Size
    number: Tensor
    absent: nn.Parameter = field(init=False)

    def put(self, parameter: nn.Parameter) -> None:
        for owner, name in self.owners:
            setattr(owner, name, parameter)


class _Part:
    """Parameters that are gathered as one run of bytes. `share`: this rank's bytes."""

    def __init__(
        self,
        parameters: Mapping[str, tuple[Tensor, Owners]],
        axis: Axis,
        device: torch.device,
        *,
        pinned: bool,
    ) -> None:
        self._shared: dict[str, _Shared] = {}
        self.turns = 0  # nested calls of the block that are running
        end, found = 0, []
        for name, (parameter, owners) in parameters.items():
            tensors, assemble_tensor = component_tensors(parameter)
            pieces = []
            for tensor in tensors:
                pieces.append((tensor.dtype, tensor.shape, end))
                found.append((tensor, end))
                end += _aligned(tensor.nbytes)
            number = torch.empty((), dtype=parameter.dtype, device=device)
            self._shared[name] = _Shared(owners, pieces, assemble_tensor, parameter.shape, number)
        size = _aligned(-(-end // axis.size))
        memory = torch.empty(size, dtype=_BYTES, device="cpu" if pinned else device, pin_memory=pinned)
        self.share = nn.Parameter(memory, requires_grad=False)
        self._first = axis.index * size
        for tensor, begin in found:
            self._keep(tensor, begin)
        self.show_shapes({})

    def show_shapes(self, shapes: Mapping[str, Sequence[int]]) -> None:
        for name, shared in self._shared.items():
            shape = shapes.get(name, shared.shape)
            shared.absent = shared.number.expand(tuple(shape)).as_subclass(AbsentWeight)
        self.drop()

    def has(self, name: str) -> bool:
        return name in self._shared

    def keeps(self, name: str) -> bool:
        last = self._first + self.share.numel()
        spans = (
            (begin, begin + shape.numel() * dtype.itemsize)
            for dtype, shape, begin in self._shared[name].pieces
        )
        return any(begin < last and end > self._first for begin, end in spans)

    def put(self, name: str, value: Tensor) -> None:
        pieces, (tensors, _) = self._shared[name].pieces, component_tensors(value)
        for tensor, (dtype, shape, begin) in zip(tensors, pieces, strict=True):
            assert (tensor.dtype, tensor.shape) == (dtype, shape), (
                "ComfyUI patches a weight in its own format"
            )
            self._keep(tensor, begin)

    def fill(self, whole: Tensor) -> None:
        """Sets the parameters to views of the gathered bytes."""
        for shared in self._shared.values():
            tensors = [
                whole[begin : begin + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)
                for dtype, shape, begin in shared.pieces
            ]
            shared.put(nn.Parameter(shared.assemble_tensor(tensors), requires_grad=False))

    def drop(self) -> None:
        for shared in self._shared.values():
            shared.put(shared.absent)

    def _keep(self, tensor: Tensor, begin: int) -> None:
        """Copies the bytes of a tensor that fall into this rank's share; reads no others. `begin`: its first byte."""
        low, high = max(begin, self._first), min(begin + tensor.nbytes, self._first + self.share.numel())
        if low < high:
            data = tensor.contiguous().reshape(-1).view(_BYTES)
            self.share.data[low - self._first : high - self._first].copy_(data[low - begin : high - begin])


def _called(blocks: Iterable[nn.Module]) -> Iterator[nn.Module]:
    for block in blocks:
        if type(block).forward is nn.Module.forward and not _other_methods(block):
            yield from _called(block.children())
        else:
            yield block


def _other_methods(block: nn.Module) -> set[str]:
    """Returns the public methods of a block's own classes, except nn.Module's; methods of layers are left out."""
    kinds = [kind for kind in type(block).__mro__ if not kind.__module__.startswith(_LAYERS)]
    functions = {
        name for kind in kinds for name, value in vars(kind).items() if isinstance(value, FunctionType)
    }
    return {name for name in functions if not (name.startswith("_") or hasattr(nn.Module, name))}


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
