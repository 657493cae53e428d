"""A rank whose model is a script: real process, real link, real gloo group; only weights and forward are stand-ins.

Sidecars of the process tests start it with `python -m`. The weights file is a text that says how loading goes, the
velocity is x times the scale in it, and the prompt's first number says what the forward does.
"""

import os
import signal
import sys
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType, SimpleNamespace

import torch
import torch.distributed as dist

import parallel_backend

# A scripted rank has no model, so it need not import a model library, which would make each start five times as long:
# the engine's package stays unexecuted.
_engine = ModuleType("parallel_backend.engine")
_engine.__path__ = [str(Path(parallel_backend.__file__).parent / "engine")]
sys.modules[_engine.__name__] = _engine

from parallel_backend.errors import CheckpointError  # noqa: E402
from parallel_backend.rank.__main__ import main  # noqa: E402
from parallel_backend.rank.work.worker import RankWorker  # noqa: E402
from parallel_backend.wire.heartbeat import heartbeat  # noqa: E402
from tests.support.scripted import (  # noqa: E402
    CRASH,
    FLOOD,
    NO_MEMORY,
    RAISE,
    RAISE_ALL,
    SLOW,
    STUCK,
    scripted_inputs,
)


@dataclass
class ScriptedForward:
    """Velocity = scale * x * mean(context), summed over the ranks so that each call is a collective."""

    scale: float
    world: object
    engine: str = "scripted"
    bytes_sent: int = 0
    notes: list[str] = field(default_factory=list)
    calls: int = 0
    patchwise: None = None
    exact: bool = True
    kernel: str = "torch"
    compiles: bool = False

    @property
    def device(self):
        return self.world.device

    def __call__(self, rows):
        self.calls += 1
        behave(int(rows[0].conditioning.pooled[0, 0]), self.world.rank, self.calls)
        share = torch.tensor([self.scale / self.world.world_size])
        if self.world.control is not None:
            with heartbeat.inside("an all-reduce", range(self.world.world_size)):
                dist.all_reduce(share, group=self.world.control)
        self.bytes_sent += share.nbytes
        return [row.x.float() * share * row.conditioning.context.float().mean() for row in rows]

    def from_first(self, tensor):
        return tensor  # ranks of one machine's processors draw the same


class ScriptedModule(ScriptedForward):
    """What a module's call gives: x times the scale, the rank's share of which is summed, and what it was told."""

    @property
    def model(self):
        return SimpleNamespace(module=self)

    def __call__(self, call, cache=None):
        self.calls += 2
        behave(call.kwargs.get("behaviour", 0), self.world.rank, self.calls)
        share = torch.tensor([self.scale / self.world.world_size])
        dist.all_reduce(share, group=self.world.control)
        (x,) = call.args
        if "context" in call.kwargs:
            x.mul_(call.kwargs["context"].mul_(2).mean())  # in place: no other call may see it
        return [x.mul_(share), (call.method, call.tokens, call.rows, call.kwargs.get("names"))]


def behave(code, rank, calls):
    if code == SLOW:
        time.sleep(0.05)
    if code == FLOOD:
        sys.stderr.write("noise " * 200_000 + "\n")
    if code == RAISE_ALL:
        raise ValueError("every rank refuses")
    if rank != 1 or calls < 2:
        return
    if code == CRASH:
        os.kill(os.getpid(), signal.SIGKILL)
    if code == RAISE:
        raise ValueError("the tensor is upside down")
    if code == NO_MEMORY:
        raise torch.OutOfMemoryError("tried to allocate a lot")
    if code == STUCK:
        os.kill(os.getpid(), signal.SIGSTOP)


class ScriptedJobs(RankWorker):
    def load(self, message):
        info, script = super().load(message), Path(message.spec.path).read_text().split()
        return replace(info, device_bytes=int(script[1]) if script[0] == "weighs" else 0)

    def _read_model(self, spec, strategy):
        script = Path(spec.path).read_text().split()
        if script[0] == "refused" and self.world.rank == int(script[1]):
            raise CheckpointError(f"{spec.path} is refused by rank {script[1]}.")
        if script[0] == "no-memory-then-refused" and self.world.rank == int(script[1]):
            if len(self.models) > 1:
                raise MemoryError("tried to load a lot")
            raise CheckpointError(f"{spec.path} is refused by rank {script[1]}.")
        if script[0] == "no-memory":  # always, beside any other model, or beside more than that many
            most = {"always": -1, "beside": 0}.get(script[1], script[1])
            if len(self.models) > int(most):
                raise MemoryError("tried to load a lot")
        scale = float(script[-1])
        return SimpleNamespace(
            scale=scale,
            chunks=(),
            bytes=4,
            compute_dtype=torch.float32,
            stored_dtype="float32",
            sharding=None,
        )

    def _read_inputs(self, spec):
        return scripted_inputs(spec)

    def _make_forward(self, model, placement):
        return ScriptedForward(scale=model.scale, world=self.world)

    def _module_forward(self, held, placement):
        return ScriptedModule(scale=held.model.scale, world=self.world)


if __name__ == "__main__":
    main(ScriptedJobs)
