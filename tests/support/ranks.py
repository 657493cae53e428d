"""Runs a function on N real ranks and brings back what they return; every distributed test uses it."""

from __future__ import annotations

import gc
import io
import multiprocessing
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from host_and_device import DEVICE, HOST, HostAndDevice
from nccl_device import unwaited
from nccl_semantics import NCCL_SEMANTICS, register
from parallel_backend.engine.comm.groups import World


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = 240,
    backend: str = NCCL_SEMANTICS,
    device: torch.device = HOST,
) -> list[Any]:
    """Returns the results of `fn(world, *args)` in rank order (tensors, numbers, strings, lists, dicts of them).

    Ranks are forked, so torch is not imported again. Raises RankError with the traceback of the first rank that
    failed; a rank that does not answer within `timeout` seconds is ended and named. `backend`: for data between
    devices. NCCL's stand-in is stricter; use gloo for tests of data that only goes over gloo. `device`: DEVICE if its
    memory must be separate from the host's.
    """
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        pipes = [context.Pipe(duplex=False) for _ in range(world_size)]
        ranks = [
            context.Process(
                target=_rank,
                args=(fn, rank, world_size, store, pipes[rank][1], args, backend, device),
                daemon=True,
            )
            for rank in range(world_size)
        ]
        for rank, (_, writer) in zip(ranks, pipes, strict=True):
            rank.start()
            writer.close()
        try:
            return _collect(pipes, timeout)
        finally:
            for process, (reader, _) in zip(ranks, pipes, strict=True):
                process.kill()
                process.join()
                process.close()
                reader.close()


class RankError(AssertionError):
    """A rank raised, died or did not answer."""


def _collect(pipes, timeout: float) -> list[Any]:
    deadline = time.monotonic() + timeout
    waiting = {reader: rank for rank, (reader, _) in enumerate(pipes)}
    results: list[Any] = [None] * len(pipes)
    while waiting:
        ready = multiprocessing.connection.wait(list(waiting), max(0.0, deadline - time.monotonic()))
        if not ready:
            raise RankError(f"ranks {sorted(waiting.values())} did not answer within {timeout} s")
        for reader in ready:
            rank = waiting.pop(reader)
            try:
                failed, payload = reader.recv()
            except EOFError:
                raise RankError(f"rank {rank} died without a word") from None
            if failed:
                raise RankError(f"rank {rank} raised:\n{payload}")
            results[rank] = torch.load(io.BytesIO(payload), weights_only=True)
    return results


def _rank(fn, rank, world_size, store, writer, args, backend, device) -> None:
    gc.freeze()  # a garbage collection would write to every page of what the parent has imported, and so copy it
    torch.set_num_threads(1)
    try:
        register()
        world = World(rank=rank, world_size=world_size, device=device, backend=backend, store_path=store)
        buffer = io.BytesIO()
        with HostAndDevice() if device == DEVICE else nullcontext():
            result = fn(world, *args)
        torch.save(result, buffer)
        if backend == NCCL_SEMANTICS and (left := unwaited()):
            raise RankError(f"nobody has waited for {', '.join(left)}")
        writer.send((False, buffer.getvalue()))
    except BaseException:
        writer.send((True, traceback.format_exc()))
    # The parent ends this process: an exit here could break a peer's last collective.
    time.sleep(3600)
