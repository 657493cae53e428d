"""A rank that loads its part of a model and says what memory of its own it gained.

`python share_holder.py RANK STORE SMALL LARGE STRATEGIES`: STRATEGIES is a JSON list of ParallelStrategy's fields, each
for as many ranks. Fresh interpreters, because a forked one shares its heap with its parent. Prints a JSON object for
each: bytes of anonymous memory gained by loading LARGE, still held after a forward that read every weight, and held at
most meanwhile.
"""

from __future__ import annotations

import ctypes
import gc
import json
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from parallel_backend.engine.factory import make_forward

from parallel_backend.engine.comm.groups import Layouts, World
from parallel_backend.engine.load import load_under
from parallel_backend.requests import Conditioning, ModelSpec, Placement, Rows
from parallel_backend.strategy import ParallelStrategy


def private_bytes() -> int:
    """Anonymous memory of this process; pages of a mapped file are not."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon:")) * 1024


def load(layouts: Layouts, path: str, strategy: ParallelStrategy):
    model = load_under(ModelSpec(path), layouts, strategy)
    return model, make_forward(model, layouts, Placement(strategy, "native"))


@torch.inference_mode()
def call(model, forward) -> torch.Tensor:
    dims = model.file.dims
    prompt = Conditioning(
        torch.randn(1, 3, dims.context_dim), torch.randn(1, dims.pooled_dim), torch.tensor([3.5])
    )
    return forward([Rows(torch.randn(1, 16, 4, 4), torch.tensor([0.5]), prompt)])[0]


def gained(layouts: Layouts, small: str, large: str, strategy: ParallelStrategy) -> dict[str, int]:
    call(*load(layouts, small, strategy))  # what every first use costs, weights aside
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # else what was freed before would hold what is measured
    before = private_bytes()
    model, forward = load(layouts, large, strategy)
    loaded, peak = private_bytes() - before, [0]
    for module in model.transformer.modules():
        module.register_forward_hook(lambda *_: peak.append(private_bytes() - before))
    for _ in range(2):
        call(model, forward)
    return {"loaded": loaded, "held": private_bytes() - before, "peak": max(peak)}


def main(rank: str, store: str, small: str, large: str, strategies: str) -> None:
    torch.set_num_threads(1)
    wanted = [ParallelStrategy(**strategy) for strategy in json.loads(strategies)]
    world = World(
        rank=int(rank),
        world_size=wanted[0].world_size,
        device=torch.device("cpu"),
        backend="gloo",
        store_path=store,
    )
    layouts = Layouts(world)
    for strategy in wanted:
        print(json.dumps(gained(layouts, small, large, strategy)), flush=True)
    sys.stdin.readline()  # the peers may still be busy


if __name__ == "__main__":
    main(*sys.argv[1:])
