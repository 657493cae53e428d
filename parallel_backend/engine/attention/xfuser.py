"""xfuser's attention for any module's blocks, if it computes exactly what a call asks for; native does the rest.

USP (xfuser/model_executor/layers/usp.py) needs the same number of tokens on every rank. Each rank gives USP as many
tokens as the rank with the fewest has. The few surplus tokens go in as USP's *joint* tensors, which are replicated:
every rank computes all of them and keeps its own. No padding reaches a softmax.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from enum import Enum
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...layout import slice_of
from ...models.attention import Attend, AttentionCall
from ...wire.heartbeat import heartbeat
from ..comm.collectives import all_gather
from ..comm.groups import Layout
from .kernel_choice import kernel_for
from .sequence import SequenceAttention, Streams

if TYPE_CHECKING:
    from .compat_xfuser import Xfuser

# The most tokens that one rank may have more than another: all ranks compute all surplus tokens.
_MAX_SURPLUS = 4
# Arguments of ComfyUI's attention that do not change the result here.
_HARMLESS = {"transformer_options", "low_precision_attention"}
# xfuser's names for the kernels that kernel_choice.kernel_for picks.
_BACKENDS = {"flash_3": "FLASH_3", "flash": "FLASH", "cudnn": "CUDNN"}

_current: Layout | None = None  # xfuser keeps its groups in module globals: one layout at a time per process


def why_not_xfuser(layout: Layout) -> str:
    """Returns why xfuser has nothing to compute under this layout, worded for users; empty if it has."""
    if layout.tensor.size > 1:
        return "its tensor parallelism splits the feed-forward layers only"
    if layout.pipe.size > 1:
        return "its PipeFusion belongs to its own pipelines"
    if layout.sequence.size == 1:
        return f"{layout.strategy.describe()} splits no tokens, which is all that it would compute"
    if find_spec("xfuser") is None:
        return "the package xfuser is not installed"
    return ""


class XfuserEngine:
    """xfuser's groups for one layout, and attention over them. `add_note`: called with the reason each time native
    computes instead. Collective: all ranks create it together, which imports xfuser and makes its groups."""

    def __init__(self, layout: Layout, dtype: torch.dtype, add_note: Callable[[str], None]) -> None:
        from .compat_xfuser import load_xfuser  # takes seconds to import, so only on request

        kernel = kernel_for(layout.world.device, dtype, ring=layout.ring.size > 1).name
        self._layout = layout
        self._xfuser = load_xfuser(on_cpu=layout.world.device.type == "cpu")
        self._backend = _backend(self._xfuser, kernel, layout)
        self.add_note = add_note
        self.attended = False  # True if xfuser has computed some attention since `prepare`
        _lay_groups(self._xfuser, layout)

    def prepare(self) -> None:
        """Sets xfuser's global groups back to this layout's, if another strategy ran since. Collective; every call of
        the module starts with it."""
        _lay_groups(self._xfuser, self._layout)
        self.attended = False

    def attend(self, query: Tensor, key: Tensor, value: Tensor, lengths: tuple[int, ...]) -> Tensor:
        """Returns attention of this rank's queries over all keys. Tensors have this rank's tokens: [B, H, s, D].
        `lengths`: the number of tokens on each rank."""
        self.attended = True
        common = min(lengths)
        surplus = tuple(length - common for length in lengths)
        self._count(query, common, sum(surplus))
        main = [t[:, :, :common] for t in (query, key, value)]
        if not any(surplus):
            return self._usp(main, {})
        extra = self._surplus_of_all(query, key, value, surplus)
        joint = dict(zip(("joint_query", "joint_key", "joint_value"), extra, strict=True))
        out = self._usp(main, {**joint, "joint_strategy": "rear"})
        mine = slice_of(surplus, self._layout.sequence.index)
        return torch.cat([out[:, :, :common], out[:, :, common + mine.start : common + mine.stop]], dim=2)

    def _usp(self, main: list[Tensor], joint: dict[str, object]) -> Tensor:
        with heartbeat.inside("xfuser's attention", self._layout.sequence.ranks):
            out: Tensor = self._xfuser.usp.USP(*main, **joint, backend=self._backend)
        return out

    def _count(self, query: Tensor, common: int, surplus: int) -> None:
        """Counts what USP sends from this rank: q, k, v and output over Ulysses, keys and values over the ring."""
        u, r = self._layout.ulysses.size, self._layout.ring.size
        ulysses = (4 * common + 2 * surplus) * (u - 1) // u
        ring = 2 * common * (r - 1)
        self._layout.sequence.traffic.add(
            (ulysses + ring) * query.shape[0] * query.shape[1] * query.shape[3], query
        )

    def _surplus_of_all(
        self, query: Tensor, key: Tensor, value: Tensor, surplus: tuple[int, ...]
    ) -> Iterator[Tensor]:
        """Gathers the surplus tokens of all ranks: queries, keys and values [B, H, surplus, D]."""
        common = query.shape[2] - surplus[self._layout.sequence.index]
        mine = torch.stack([t[:, :, common:] for t in (query, key, value)]).permute(3, 0, 1, 2, 4)
        gathered = all_gather(mine, surplus, self._layout.sequence)
        return (gathered[:, n].permute(1, 2, 0, 3) for n in range(3))


class UspAttention(SequenceAttention):
    """Attention in one call of a block: by xfuser if that is exact, otherwise by native."""

    def __init__(self, engine: XfuserEngine, *of_call: Any, **options: Any) -> None:
        super().__init__(*of_call, **options)
        assert self.stale_keys is None, "PipeFusion's stages attend by native"
        self._engine = engine

    def _attend(self, library: Attend, call: AttentionCall, streams: Streams) -> Tensor:
        lengths = self.tokens.lengths(streams.keys)
        reason = self._refusal(call, streams, lengths)
        if reason:
            self._engine.add_note(f"engine xfuser fell back to native: {reason}")
            return super()._attend(library, call, streams)
        return self._engine.attend(call.q, call.k, call.v, lengths)

    def _refusal(self, call: AttentionCall, streams: Streams, lengths: tuple[int, ...]) -> str:
        """Returns why native must compute this call, worded for users, or "" for xfuser. The same on all ranks."""
        heads, key_heads = call.heads, call.k.shape[1]
        if streams.queries != streams.keys:
            return "it knows attention of tokens to themselves only"
        if call.mask is not None or streams.guides is not None:
            return "it computes no attention masks"
        if key_heads != heads or heads % self._ulysses.size:
            return f"its Ulysses needs heads that divide, and here are {heads} heads with {key_heads} of keys"
        unknown = sorted(name for name, value in call.options.items() if value and name not in _HARMLESS)
        if unknown:
            return f"it takes no {', '.join(unknown)}"
        if not min(lengths):
            return (
                f"it needs a token for each process, and {len(lengths)} processes share {sum(lengths)} tokens"
            )
        if max(lengths) - min(lengths) > _MAX_SURPLUS:
            return "it needs equal shares, and device_shares asks for others"
        return ""


def _backend(xfuser: Xfuser, kernel: str, layout: Layout) -> Enum:
    name = _BACKENDS.get(kernel, "SDPA")
    if name == "SDPA" and layout.ring.size > 1:  # the ring needs a log-sum-exp
        name = "SDPA_FLASH" if layout.world.device.type == "cpu" else "SDPA_EFFICIENT"
    return xfuser.backends[name]


def _lay_groups(xfuser: Xfuser, layout: Layout) -> None:
    """Sets xfuser's global groups to those of `layout`. Collective when they change."""
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
