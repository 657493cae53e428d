"""A rank whose model is a script: real process, real link, real gloo group; only weights and forward are stand-ins.

Sidecars of the process tests start it with `python -m`. The weights file is a text: it says how loading ends and has
the scale of the velocity. The first number of the prompt's pooled vector says what the forward does.
"""

import os
import signal
import sys
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist

from parallel_backend.errors import CheckpointError
from parallel_backend.rank.__main__ import main
from parallel_backend.rank.work.worker import RankWorker
from parallel_backend.wire.heartbeat import heartbeat
from tests.support.scripted import CRASH, FLOOD, NO_MEMORY, RAISE, RAISE_ALL, SLOW


@dataclass
class ScriptedForward:
    """A forward with ModuleForward's interface. Velocity = scale * x * mean(context), summed over the ranks: each call
    is a collective."""

    scale: float
    world: object
    strategy: object
    engine: str = "scripted"
    bytes_sent: int = 0
    notes: list[str] = field(default_factory=list)
    calls: int = 0
    stages: None = None
    exact: bool = True
    kernel: str = "torch"
    compiles: bool = False
    traffic: object = None

    def begin(self) -> None:
        self.notes.clear()

    @property
    def model(self):
        return SimpleNamespace(module=self, device=self.world.device)

    @property
    def layout(self):
        alone = SimpleNamespace(size=self.strategy.world_size, index=self.world.rank, group=None)
        return SimpleNamespace(strategy=self.strategy, everyone=alone)

    def __call__(self, call, cache=None):
        self.calls += 1
        (x, _), prompt = call.args, call.kwargs
        behave(int(prompt["y"][0, 0]), self.world.rank, self.calls)
        share = torch.tensor([self.scale / self.world.world_size])
        if self.world.control is not None:
            with heartbeat.inside("an all-reduce", range(self.world.world_size)):
                dist.all_reduce(share, group=self.world.control)
        self.bytes_sent += share.nbytes
        return x.float() * share * prompt["context"].float().mean(dim=(1, 2)).view(-1, 1, 1, 1)


def behave(code, rank, calls):
    if code == SLOW:
        time.sleep(0.05)
    if code == FLOOD:
        sys.stderr.write("noise " * 200_000 + "\n")
    if code == RAISE_ALL:
        raise ValueError("every process refuses")
    if rank != 1 or calls < 2:
        return
    if code == CRASH:
        os.kill(os.getpid(), signal.SIGKILL)
    if code == RAISE:
        raise ValueError("the tensor is upside down")
    if code == NO_MEMORY:
        raise torch.OutOfMemoryError("tried to allocate a lot")


class ScriptedJobs(RankWorker):
    def load(self, message, tensors):
        info, script = super().load(message, tensors), Path(message.spec.path).read_text().split()
        return replace(info, device_bytes=int(script[1]) if script[0] == "weighs" else 0)

    def _read_model(self, spec, strategy):
        script = Path(spec.path).read_text().split()
        if script[0] == "refused" and self.world.rank == int(script[1]):
            raise CheckpointError(f"{spec.path} is refused by process {script[1]}.")
        if script[0] == "no-memory-then-refused" and self.world.rank == int(script[1]):
            if len(self.models) > 1:
                raise MemoryError("tried to load a lot")
            raise CheckpointError(f"{spec.path} is refused by process {script[1]}.")
        # "always", or the number of models beside which there is none
        if script[0] == "no-memory" and (script[1] == "always" or len(self.models) > int(script[1])):
            raise MemoryError("tried to load a lot")
        scale = float(script[-1])
        return SimpleNamespace(
            scale=scale,
            chunks=(),
            bytes=4,
            compute_dtype=torch.float32,
            stored_dtype="float32",
            byte_sharding=None,
        )

    def _forward(self, held, placement):
        return held.forwards.setdefault(
            placement, ScriptedForward(held.model.scale, self.world, placement.strategy)
        )


if __name__ == "__main__":
    main(ScriptedJobs)
