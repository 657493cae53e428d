"""The xfuser engine: its groups and its USP attention behind the native engine's seam, made exact for any length.

USP (xfuser/model_executor/layers/usp.py) wants the same number of tokens on every rank. Each rank gives USP as
many tokens as all have, and the few left over go in as its *joint* tensors, which are replicated: every rank computes
them and keeps its own. No padding reaches a softmax.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from ...layout import slice_of
from ...wire.heartbeat import heartbeat
from ..comm.collectives import all_gather
from ..comm.groups import Axis, Layout
from ..comm.traffic_counter import Traffic
from .compat_xfuser import Xfuser, load_xfuser
from .kernels import TORCH

# xfuser's names for the kernels that kernel_choice.kernel_for picks.
_BACKENDS = {"flash_3": "FLASH_3", "flash": "FLASH", "cudnn": "CUDNN"}

_current: Layout | None = None  # xfuser keeps its groups in module globals: one layout at a time per process


class XfuserAttention:
    """The engine: attention over the tokens of all ranks of the sequence axis, by USP."""

    def __init__(self, layout: Layout, kernel: str, traffic: Traffic) -> None:
        """Collective: all ranks import xfuser and lay out its groups together."""
        self._layout = layout
        self._axis = layout.sequence
        self._traffic = traffic
        self._xfuser = load_xfuser()
        self._backend = _backend(self._xfuser, kernel, layout)
        self._kernel = kernel if kernel in _BACKENDS else TORCH
        _lay_groups(self._xfuser, layout)

    def prepare(self) -> None:
        """Makes xfuser's global groups this layout's again, if another strategy ran since."""
        _lay_groups(self._xfuser, self._layout)

    def of_lengths(self, lengths: tuple[int, ...]) -> UspCall:
        """The attention of one model call. `lengths`: tokens of each rank."""
        return UspCall(self._layout, self._xfuser, self._backend, self._kernel, self._traffic, lengths)


@dataclass(frozen=True, eq=False)
class UspCall:
    """Attention of one model call over the tokens of all ranks that share them."""

    _layout: Layout
    _xfuser: Xfuser
    _backend: Enum
    kernel: str
    _traffic: Traffic
    lengths: tuple[int, ...]

    @property
    def _axis(self) -> Axis:
        return self._layout.sequence

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """This rank's queries over everybody's keys: [B, s, H, D] of this rank's tokens in and out."""
        lengths = self.lengths
        common, surplus = min(lengths), sum(lengths) - min(lengths) * len(lengths)
        self._count(query, common, surplus)
        main = [t[:, :common].transpose(1, 2) for t in (query, key, value)]
        if not surplus:
            return self._usp(main, {}).transpose(1, 2)
        extra = self._surplus_of_all(query, key, value, common)
        joint = dict(zip(("joint_query", "joint_key", "joint_value"), extra, strict=True))
        out = self._usp(main, {**joint, "joint_strategy": "rear"}).transpose(1, 2)
        if lengths[self._axis.index] == common:
            return out[:, :common]
        mine = slice_of(tuple(length - common for length in lengths), self._axis.index)
        return torch.cat([out[:, :common], out[:, common + mine.start : common + mine.stop]], dim=1)

    def _usp(self, main: list[Tensor], joint: dict[str, object]) -> Tensor:
        with heartbeat.inside("xfuser's attention", self._axis.ranks):
            return self._xfuser.usp.USP(*main, **joint, backend=self._backend)

    def _count(self, query: Tensor, common: int, surplus: int) -> None:
        """Counts what USP sends from this rank: q, k, v and the output over Ulysses, keys and values round the ring."""
        u, r = self._layout.ulysses.size, self._layout.ring.size
        ulysses = (4 * common + 2 * surplus) * (u - 1) // u
        ring = 2 * common * (r - 1)
        self._traffic.add((ulysses + ring) * query.shape[0] * query.shape[2] * query.shape[3], query)

    def _surplus_of_all(self, query: Tensor, key: Tensor, value: Tensor, common: int) -> Iterator[Tensor]:
        """The tokens that only some ranks have, from every rank that has one: 3 x [B, H, surplus, D]."""
        mine = torch.stack([query[:, common:], key[:, common:], value[:, common:]]).permute(2, 0, 1, 3, 4)
        sizes = tuple(length - common for length in self.lengths)
        gathered = all_gather(mine, sizes, self._axis, self._traffic)
        return (gathered[:, n].permute(1, 2, 0, 3) for n in range(3))


def _backend(xfuser: Xfuser, kernel: str, layout: Layout) -> Enum:
    name = _BACKENDS.get(kernel, "SDPA")
    if name == "SDPA" and layout.ring.size > 1:  # the ring needs a log-sum-exp
        name = "SDPA_FLASH" if layout.world.device.type == "cpu" else "SDPA_EFFICIENT"
    return xfuser.backends[name]


def _lay_groups(xfuser: Xfuser, layout: Layout) -> None:
    """Makes xfuser's global groups those of `layout`. Collective when they change."""
    global _current
    if _current is layout:
        return
    world, strategy = layout.world, layout.strategy
    distributed = xfuser.distributed
    if _current is not None:
        distributed.destroy_model_parallel()
    _current = layout
    distributed.init_distributed_environment(
        rank=world.rank,
        world_size=world.world_size,
        local_rank=world.device.index or 0,
        backend="gloo" if world.device.type == "cpu" else "nccl",
    )
    distributed.initialize_model_parallel(
        data_parallel_degree=strategy.data_degree,
        classifier_free_guidance_degree=strategy.cfg_degree,
        sequence_parallel_degree=strategy.sequence_degree,
        ulysses_degree=strategy.ulysses_degree,
        ring_degree=strategy.ring_degree,
        backend="gloo" if world.device.type == "cpu" else "nccl",
    )
