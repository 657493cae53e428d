"""Checks one model call on the ranks: where the host waits for the device, and which kernels take the time."""

from __future__ import annotations

import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ...engine.comm.groups import Layouts
from ...engine.load import load_under
from ...engine.module_forward import make_module_forward
from ...engine.plain_calls import answers_to
from ...models.registry import inspect_model
from ...options import ComputeOptions
from ...requests import Conditioning, ModelSpec, Placement, Rows
from ...strategy import ParallelStrategy
from ...wire.checks.findings import NO_GPU, CheckSubject, Finding

_PACK = "parallel_backend"
_WARM_UP = 2  # calls: the first ones choose kernels and grow buffers
_ROWS_SHOWN = 12
_NAME_WIDTH = 72
# Operators that return a value to the host; on a GPU each waits for all launched work.
_READS = ("_local_scalar_dense", "is_nonzero", "equal", "nonzero")
_PIXELS_PER_LATENT = 8


class ModelCalls:
    """Makes single model calls under Ulysses over all ranks of `layouts`."""

    def __init__(self, subject: CheckSubject, layouts: Layouts) -> None:
        self._subject, self._layouts, self._world = subject, layouts, layouts.world
        self._file = inspect_model(subject.model)
        ulysses, ring = self._file.shape.split_sequence(self._world.world_size)
        self._strategy = ParallelStrategy(ulysses_degree=ulysses, ring_degree=ring)

    def check_synchronisations(self) -> list[Finding]:
        call = self._call(ComputeOptions(compile="off"))
        if self._world.device.type != "cuda":
            reads = count_reads(call)
            words = (
                f"{sum(reads.values())} values were read by the host in one model call, counted on the CPU"
            )
            details = tuple(f"{name}: {count}" for name, count in reads.items())
            return [
                Finding("host waits", "skipped", f"{NO_GPU}: set_sync_debug_mode is CUDA's"),
                Finding("host reads", "slow" if reads else "ok", words, details=details),
            ]
        return [find_waits(call)]

    def profile(self) -> list[Finding]:
        """Returns, on rank 0 only, the slowest kernels of a compiled model call and how long the device is busy."""
        from torch.profiler import ProfilerActivity, profile

        on_gpu = self._world.device.type == "cuda"
        call = self._call(ComputeOptions(compile="blocks"))
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
        self._world.synchronize()
        with profile(activities=activities) as profiled:
            began = time.perf_counter()
            call()
            self._world.synchronize()
            wall = time.perf_counter() - began
        if self._world.rank:
            return []
        return [describe_profile(profiled.key_averages(), wall, on_gpu, self._strategy.describe())]

    def _call(self, options: ComputeOptions) -> Callable[[], Tensor]:
        """Returns a warmed-up function that makes one model call and returns its velocity."""
        model = load_under(ModelSpec(self._subject.model), self._layouts, self._strategy)
        placement = Placement(self._strategy, compute_options=options)
        forward = make_module_forward(model, self._layouts, placement)
        rows = self._rows()

        @torch.inference_mode()
        def call() -> Tensor:
            (velocity,) = answers_to([rows], model.module, forward)
            return velocity

        for _ in range(_WARM_UP):
            call()
        self._world.synchronize()
        return call

    def _rows(self) -> Rows:
        """Returns one image of noise and one prompt of random numbers, on the device."""
        generator, device = torch.Generator().manual_seed(0), self._world.device
        inputs, side = self._file.inputs, self._subject.pixels // _PIXELS_PER_LATENT

        def draw(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).to(device)

        prompt = Conditioning(
            context=draw(1, self._subject.text, inputs.context),
            pooled=draw(1, inputs.pooled),
            guidance=torch.tensor([3.5], device=device),  # ignored by a model without guidance embedding
        )
        x = draw(1, inputs.channels_in, side, side)
        return Rows(x, torch.tensor([0.5], device=device), prompt)


def count_reads(call: Callable[[], object]) -> Counter[str]:
    """Counts how often `call` returns tensor values to the host, by operator."""
    reads: Counter[str] = Counter()

    class Reads(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:  # torch's signature
            name = func.overloadpacket.__name__
            if name in _READS:
                reads[name] += 1
            return func(*args, **(kwargs or {}))

    with Reads():
        call()
    return reads


def find_waits(call: Callable[[], object], cuda: Any = torch.cuda) -> Finding:
    """Finds the places in `call` where the host waits for the device. `cuda`: torch.cuda, or a test's substitute."""
    try:
        with _sync_debug("error", cuda):
            call()
    except RuntimeError as error:
        if "synchroniz" not in str(error):
            raise
        first = _place(error)
    else:
        return Finding("host waits", "ok", "none in one model call")
    with warnings.catch_warnings(record=True) as caught, _sync_debug("warn", cuda):
        warnings.simplefilter("always")
        call()
    places = Counter(
        f"{_below_pack(w.filename)}:{w.lineno}" for w in caught if "synchroniz" in str(w.message).lower()
    )
    return Finding(
        "host waits",
        "slow",
        f"the host waits for the device {sum(places.values())} times in one model call, first at {first}",
        "report it: while the host waits nothing is launched, and small steps take longer than they need",
        tuple(f"{count} × {place}" for place, count in places.most_common(_ROWS_SHOWN)),
    )


@contextmanager
def _sync_debug(mode: str, cuda: Any) -> Iterator[None]:
    before = cuda.get_sync_debug_mode()
    cuda.set_sync_debug_mode(mode)
    try:
        yield
    finally:
        cuda.set_sync_debug_mode(before)


def describe_profile(averages: Any, wall_s: float, on_gpu: bool, strategy: str) -> Finding:
    """Describes a profile. `averages`: from torch.profiler, in microseconds; `wall_s`: seconds of the whole call."""
    if on_gpu:
        # Kernels only: host operators and named device regions would count the same time again.
        rows = [
            (e.key, e.self_device_time_total, e.count)
            for e in averages
            if "CPU" not in str(e.device_type) and not getattr(e, "is_user_annotation", False)
        ]
    else:
        rows = [(e.key, e.self_cpu_time_total, e.count) for e in averages]
    rows.sort(key=lambda row: -row[1])
    busy = sum(time_us for _, time_us, _ in rows) / 1e6
    what = "the device computes" if on_gpu else "operators take"
    words = f"{strategy}, compiled: one model call takes {wall_s * 1e3:.1f} ms, of which {what} {busy * 1e3:.1f} ms"
    table = tuple(
        f"{time_us / 1e3:9.3f} ms {count:5d} × {key if len(key) <= _NAME_WIDTH else key[: _NAME_WIDTH - 1] + '…'}"
        for key, time_us, count in rows[:_ROWS_SHOWN]
    )
    return Finding("profile", "ok", words, details=table)


def _place(error: BaseException) -> str:
    """Returns the innermost line of the pack in the traceback of `error`."""
    frames = traceback.extract_tb(error.__traceback__)
    pack_frames = [frame for frame in frames if _PACK in Path(frame.filename).parts] or list(frames)
    return f"{_below_pack(pack_frames[-1].filename)}:{pack_frames[-1].lineno}"


def _below_pack(filename: str) -> str:
    """Returns a file's path from the pack's folder on, or only its name if it lies elsewhere."""
    parts = Path(filename).parts
    return "/".join(parts[parts.index(_PACK) :]) if _PACK in parts else parts[-1]
