"""Weight sharding (FSDP): each rank keeps its rows of every parameter; a block's are gathered while it computes.

torch's fully_shard (FSDP2; Zhao et al. 2023, "PyTorch FSDP") over the ranks that would otherwise hold equal weights:
one group of parameters per block and one for the layers around the blocks. The next block's weights travel while the
current one computes.
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from ..errors import RequestError
from ..wire.heartbeat import heartbeat
from .comm.collectives import all_gather_single
from .comm.groups import Axis, is_gloo
from .comm.traffic_counter import Traffic

_WORDS = torch.uint8  # on the wire: gloo knows no fp8, and nothing is computed on the way


class Sharding:
    """Shares out modules over `axis`. With `offload` a device's shares lie in pinned host memory."""

    def __init__(self, axis: Axis, device: torch.device, traffic: Traffic, *, offload: bool) -> None:
        if not hasattr(FSDPModule, "set_custom_all_gather"):
            raise RequestError(
                f"Weight sharding needs torch 2.9 or newer and this is {torch.__version__}; update torch, or turn "
                "shard_weights and offload_weights off."
            )
        self._axis = axis
        self._device = device
        self._gather = _CountedGather(axis, device, traffic)
        self._offload = offload and device.type != "cpu"
        self._sharded: list[tuple[FSDPModule, list[FSDPModule]]] = []  # each module with its blocks

    def shard(self, module: nn.Module, blocks: Sequence[nn.Module]) -> dict[str, tuple[Tensor, slice]]:
        """Allocates this rank's share of every parameter of a module on the meta device (base.WeightSharding).

        Returns for each name the share, uninitialised, and the rows of the parameter that belong in it.
        """
        mesh = DeviceMesh.from_group(_group(self._axis, self._device), self._device.type)
        policy = CPUOffloadPolicy(pin_memory=True) if self._offload else OffloadPolicy()
        sharded = []
        for part in (*blocks, module):
            one = fully_shard(part, mesh=mesh, reshard_after_forward=True, offload_policy=policy)
            one.set_custom_all_gather(self._gather)  # type: ignore[arg-type]  # its class is private
            sharded.append(one)
        *own, whole = sharded
        _look_ahead((whole, *own))
        rows = {name: parameter.shape[0] for name, parameter in module.named_parameters()}
        module.to_empty(device="cpu" if self._offload else self._device)
        module.register_forward_hook(self._end_call)
        self._sharded.append((whole, own))
        return {
            name: (cast(DTensor, parameter).to_local(), _share(rows[name], self._axis))
            for name, parameter in module.named_parameters()
        }

    @torch.inference_mode(False)
    @torch.no_grad()
    def join_gathers(self, blocks: range | None = None) -> None:
        """Takes part in gathering the weights for a model call, through `blocks` or all, that only other ranks make."""
        for whole, own in self._sharded:
            for module in (whole, *(own if blocks is None else own[blocks.start : blocks.stop])):
                module.unshard()
                module.reshard()
        self._gather.free()

    @contextmanager
    def only(self, blocks: range) -> Iterator[None]:
        """Inside, model calls go through `blocks` alone: what is gathered ahead follows them."""
        try:
            for whole, own in self._sharded:
                _look_ahead((whole, *own[blocks.start : blocks.stop]))
            yield
        finally:
            for whole, own in self._sharded:
                _look_ahead((whole, *own))

    def _end_call(self, module: nn.Module, *inputs_and_output: object) -> None:
        """Forgets what FSDP notes down for a backward pass that never comes; frees what the call gathered."""
        if (forget := getattr(module, "reset_iter_state", None)) is not None:
            forget()
        self._gather.free()


def _look_ahead(modules: Sequence[FSDPModule]) -> None:
    """Has each module's weights gathered while the one before it computes."""
    for module, following in pairwise(modules):
        module.set_modules_to_forward_prefetch([following])
    modules[-1].set_modules_to_forward_prefetch([])


def _share(rows: int, axis: Axis) -> slice:
    """The rows that FSDP leaves to this rank: as torch.chunk has it, the last ranks may have fewer or none."""
    size = -(-rows // axis.size)
    return slice(min(axis.index * size, rows), min((axis.index + 1) * size, rows))


def _group(axis: Axis, device: torch.device) -> dist.ProcessGroup:
    """The axis' group; FSDP wants one also for a rank that shares with nobody."""
    if axis.group is not None:
        return axis.group
    if not dist.is_initialized():
        backend = "gloo" if device.type == "cpu" else "nccl"
        store = dist.HashStore()  # type: ignore[attr-defined]  # torch exports it, but not to type checkers
        dist.init_process_group(backend, store=store, rank=0, world_size=1)
        group = dist.group.WORLD
    else:
        group = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    assert group is not None, "this rank is in it"
    return group


class _CountedGather:
    """FSDP's all-gather (torch.distributed.fsdp's AllGather), counted.

    Over gloo every gather arrives in the same memory: FSDP copies one out before it starts the next, since it looks
    only one block ahead. Shares go straight there: gloo's own all-gather fills a buffer of its thread first, and that
    thread's heap keeps it.
    """

    def __init__(self, axis: Axis, device: torch.device, traffic: Traffic) -> None:
        self._axis = axis
        self._traffic = traffic
        self._gloo = is_gloo(axis, device)
        self._arrivals = torch.empty(0, dtype=_WORDS)

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        if not self._gloo:
            return torch.empty(*size, dtype=dtype, device=device)
        numel = math.prod(map(int, size))
        needed, storage = numel * dtype.itemsize, self._arrivals.untyped_storage()
        if storage.nbytes() < needed:
            storage.resize_(0)  # nothing in it is worth moving
            storage.resize_(needed)
        return torch.empty(0, dtype=dtype).set_(storage, 0, (numel,), (1,))

    def _exchange(self, everyones: Tensor, mine: Tensor, group: dist.ProcessGroup) -> None:
        ranks, index, size = self._axis.ranks, self._axis.index, self._axis.size
        shares, waiting = everyones.chunk(size), list[dist.Work | None]()
        for peer in ((index + hop) % size for hop in range(1, size)):
            waiting.append(dist.irecv(shares[peer], ranks[peer], group=group))
            waiting.append(dist.isend(mine, ranks[peer], group=group))
        with heartbeat.inside("a gather of weights", ranks):
            for work in filter(None, waiting):
                work.wait()

    def free(self) -> None:
        """Gives memory back to the system between model calls."""
        storage = self._arrivals.untyped_storage()
        if storage.nbytes():
            storage.resize_(0)
            if (trim := _malloc_trim()) is not None:
                trim(0)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        self._traffic.add(input_tensor.numel() * (self._axis.size - 1), input_tensor)
        if self._gloo:
            self._exchange(output_tensor.view(_WORDS), input_tensor.view(_WORDS), group)
            return None
        return all_gather_single(
            output_tensor.view(_WORDS), input_tensor.view(_WORDS), group=group, async_op=async_op
        )


@functools.cache
def _malloc_trim() -> Callable[[int], int] | None:
    """glibc's way to give free memory back to the system; None where the C library has none.

    glibc keeps what was freed in its heap, on the CPU several blocks' gathered weights. Lower thresholds for the whole
    process would prevent that too, but map every activation anew (docs/benchmarks.md).
    """
    return getattr(ctypes.CDLL(None), "malloc_trim", None)
