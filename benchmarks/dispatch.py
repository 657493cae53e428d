"""Counts, without a GPU, what a step asks of one: operators, copied bytes, host synchronisations, collectives.

    python benchmarks/dispatch.py [--only ulysses_2 …] [--json]

Each strategy runs Euler steps of Flux.1-dev at 1024 x 1024 and full size as rank 0. The tensors have no data: torch's
meta device stands in for a GPU. For comparison, one call of the same model runs under diffusers' context parallelism
(`enable_parallelism`). A block's counts are the difference between a model with more blocks and one with fewer, in
Flux.1-dev's mix of kinds. A step's counts are those of its 57 blocks and of the layers around them. `sharded_ulysses_2`
is a small model on the CPU, because shares of weights are real bytes: there, every read of a tensor counts as a
synchronisation. With ComfyUI at COMFYUI_PATH, a tiny Wan of ComfyUI is counted as well: once with tokens that stay
split from block to block, once with tokens that each block gathers.

Attention counts as one operator and returns FlashAttention's layout. Collectives are counted when they start; a message
to one rank counts like a message to all. Their kernels are not among the operators. A pipeline's rank computes half of
the blocks.
"""

from __future__ import annotations

import os
from typing import NamedTuple

from subject import finish, make_parser

from counted_flux import FLUX_DEV_1024, Size, diffusers_call, flux_calls, step_counted
from dispatch_counter import Counts
from parallel_backend.models.diffusers.keys import FLUX_DEV
from parallel_backend.strategy import ParallelStrategy

FEW, MANY = (1, 2), (2, 4)  # double and single blocks, in Flux.1-dev's mix
FLUX_BLOCKS = sum((FLUX_DEV.double_blocks, FLUX_DEV.single_blocks))


class Case(NamedTuple):
    strategy: ParallelStrategy
    cfg: float = 1.0
    size: Size = FLUX_DEV_1024
    few: tuple[int, int] = FEW
    many: tuple[int, int] = MANY


ULYSSES_2 = ParallelStrategy(ulysses_degree=2)
CASES = {
    "one": Case(ParallelStrategy()),
    "ulysses_2": Case(ULYSSES_2),
    "ulysses_4": Case(ParallelStrategy(ulysses_degree=4)),
    "ring_2": Case(ParallelStrategy(ring_degree=2)),
    "usp_2x2": Case(ParallelStrategy(ring_degree=2, ulysses_degree=2)),
    "cfg_2": Case(ParallelStrategy(cfg_degree=2), cfg=4.0),
    "cfg_2_ulysses_2": Case(ParallelStrategy(cfg_degree=2, ulysses_degree=2), cfg=4.0),
    "tensor_2": Case(ParallelStrategy(tensor_degree=2)),
    "pipefusion_2": Case(ParallelStrategy(pipefusion_degree=2), few=(2, 4), many=(4, 8)),
    "sharded_ulysses_2": Case(ParallelStrategy(ulysses_degree=2, shard_weights=True), size=Size.small()),
}


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--only", nargs="+", choices=list(CASES), default=list(CASES))
    args = parser.parse_args()

    print(
        f"{'':24s}{'operators':>11s}{'copied MiB':>12s}{'collectives':>13s}   per block; host syncs per step"
    )
    strategies = {name: _told(name, _of_strategy(CASES[name])) for name in args.only}
    theirs = _told("diffusers, Ulysses 2", _row(diffusers_call(FEW), diffusers_call(MANY), blocks=3))
    result = {"strategies": strategies, "diffusers_cp": theirs}
    if "COMFYUI_PATH" in os.environ:
        result["comfyui_modules"] = _of_comfyui()
    finish(result, args.json)


def _of_strategy(case: Case) -> dict:
    stages, counts = case.strategy.pipefusion_degree, []
    for blocks in (case.few, case.many):
        with flux_calls(case.strategy, *blocks, size=case.size) as forward:
            counts.append(step_counted(forward, case.cfg, case.size))
    return _row(*counts, blocks=(sum(case.many) - sum(case.few)) // stages, of_model=FLUX_BLOCKS // stages)


def _of_comfyui() -> dict:
    from counted_flux import LAYERS, MODES, module_call

    few, many = LAYERS
    return {
        name: _told(
            name, _row(module_call(mode, few), module_call(mode, many), blocks=many - few, of_model=many)
        )
        for name, mode in MODES.items()
    }


def _row(few: Counts, many: Counts, *, blocks: int, of_model: int | None = None) -> dict:
    """Returns the counts of one block, and of a step of a model with `of_model` blocks on this rank. `few` and `many`:
    counts of a step of two models, the second with `blocks` more blocks on this rank."""
    few_, many_ = few.as_dict(), many.as_dict()
    per_block = {name: (many_[name] - few_[name]) / blocks for name in few_}
    of_model = FLUX_BLOCKS if of_model is None else of_model
    outside = {name: few_[name] - per_block[name] * blocks for name in few_}
    return {f"{name}_per_step": round(outside[name] + per_block[name] * of_model) for name in few_} | {
        f"{name}_per_block": round(per_block[name], 2) for name in few_
    }


def _told(name: str, row: dict) -> dict:
    print(
        f"{name:24s}{row['operators_per_block']:11.1f}{row['copied_bytes_per_block'] / 2**20:12.1f}"
        f"{row['collectives_per_block']:13.2f}   {row['host_syncs_per_step']}",
        flush=True,
    )
    return row


if __name__ == "__main__":
    main()
