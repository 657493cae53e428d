"""Where ranks meet inside a block, as operators of torch: a compiled block calls them, and torch never looks inside.

What is inside cannot be compiled: collectives, notes of where a rank is, keys that PipeFusion remembers. A break of the
graph would do too, but would cut each block in many. Each operator says that it changes `order`, a tensor that nobody
reads: so none is left out, and two in one block keep their order, which must be the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .attention.patch_diffusers import SharedAttention


def _new_order(device: torch.device) -> Tensor:
    with torch.inference_mode(False):  # sharded weights are computed with outside of it
        return torch.zeros(1, device=device)


_order = _new_order(torch.device("cpu"))
_attention: list[SharedAttention] = []  # the one that computes now
_sums: dict[str, Callable[[Tensor], Tensor]] = {}
_joins: dict[str, Callable[[Tensor], Tensor]] = {}


@torch.library.custom_op(
    "parallel_backend::attend",
    mutates_args=("order",),
    schema="(Tensor query, Tensor key, Tensor value, Tensor(a!) order) -> Tensor",
)
def _attend(query, key, value, order):
    # Contiguous, as the description below promises.
    return _attention[0].attend(query, key, value, None).contiguous()


@_attend.register_fake
def _(query, key, value, order):
    return query.new_empty(query.shape)


@torch.library.custom_op(
    "parallel_backend::add_up",
    mutates_args=("partial", "order"),
    schema="(Tensor(a!) partial, str meeting, Tensor(b!) order) -> ()",
)
def _add_up(partial, meeting, order):
    _sums[meeting](partial)


@torch.library.custom_op(
    "parallel_backend::join",
    mutates_args=("order",),
    schema="(Tensor columns, int degree, str meeting, Tensor(a!) order) -> Tensor",
)
def _join(columns, degree, meeting, order):
    return _joins[meeting](columns).contiguous()


@_join.register_fake
def _(columns, degree, meeting, order):
    return columns.new_empty(columns.shape[0], columns.shape[1] * degree)


class AttentionOperator:
    """Stands before the attention of the call that runs (adjust_diffusers.SharedAttention), for compiled blocks.

    `uncompiled`: how often a block called it that ran as plain Python: what is compiled calls the operator alone.
    """

    def __init__(self) -> None:
        self.uncompiled = 0

    def use(self, attention: SharedAttention, device: torch.device) -> None:
        """Has `attention` compute from now on. `device`: of its tensors."""
        global _order
        _attention[:] = [attention]
        if _order.device.type != device.type:
            _order = _new_order(device)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        """[B, s, H, D] of this rank's tokens in and out."""
        if not torch.compiler.is_compiling():
            self.uncompiled += 1
        return _attend(query, key, value, _order)


def meeting_of_slices(
    meeting: str,
    degree: int,
    add_up: Callable[[Tensor], Tensor],
    join: Callable[[Tensor], Tensor],
) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]:
    """(`add_up`, `join`) of tensor parallelism as they are, or as operators where a block is being compiled.

    `meeting` names the ranks that meet; `add_up` writes the sum into its argument, `join` gives `degree` times as many
    columns.
    """
    _sums[meeting], _joins[meeting] = add_up, join

    def added_up(partial: Tensor) -> Tensor:
        if not torch.compiler.is_compiling():
            return add_up(partial)
        _add_up(partial, meeting, _order)
        return partial

    def joined(columns: Tensor) -> Tensor:
        return _join(columns, degree, meeting, _order) if torch.compiler.is_compiling() else join(columns)

    return added_up, joined
