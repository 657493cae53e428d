"""A check of the GPU check as data, and the ranks on which it runs jobs: a group for one device, one for several."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property

from torch import Tensor

from ...devices import is_cpu
from ...errors import Cancelled, ParallelError
from ...models.model_file import ModelFile
from ...models.registry import inspect_model
from ...options import ComputeOptions
from ...requests import ModelSpec, Placement, SampleRequest, SampleResult
from ...sidecar.sidecar import Sidecar
from ...sidecar.status import RankStatus
from ...strategy import ParallelStrategy
from ...wire.checks.findings import NO_GPU, CheckSubject, Finding
from ..doctor.parity import LIMITS, largest_difference
from ..doctor.rank_probe import random_request

ALONE = ParallelStrategy()
PLAIN = ComputeOptions(compile="off")
USUAL_LIMIT = 600.0  # s; enough to load 24 GB from a slow disk and to compile the blocks


class Ranks:
    """The groups of ranks for the checks of one subject; `close` ends them. `deadline`: the time.monotonic() at which
    jobs and checks on the ranks are ended."""

    deadline = float("inf")

    def __init__(self, subject: CheckSubject) -> None:
        self.subject = subject
        self.spec = ModelSpec(subject.model)
        self._groups: dict[int, Sidecar] = {}
        self._expected: dict[tuple[tuple[int, int], str], SampleResult] = {}

    @cached_property
    def file(self) -> ModelFile:
        return inspect_model(self.subject.model)

    @property
    def count(self) -> int:
        """The number of ranks that split a picture: two, or one if there is only one device."""
        return min(2, len(self.subject.devices))

    @property
    def square(self) -> tuple[int, int]:
        return self.subject.pixels, self.subject.pixels

    def group(self, count: int, *, fresh: bool = False) -> Sidecar:
        """Returns the ranks of the first `count` devices, started anew if `fresh`. For a user's model, ends the other
        groups first, because a device may not hold it twice."""
        for other in [n for n in self._groups if (fresh if n == count else not self.subject.is_demo)]:
            self._groups.pop(other).stop()
        if count not in self._groups:
            self._groups[count] = Sidecar(self.subject.devices[:count])
        return self._groups[count]

    def close(self) -> None:
        while self._groups:
            self._groups.popitem()[1].stop()

    def request(self, size: tuple[int, int] | None = None, steps: int = 0) -> SampleRequest:
        """Returns a job with CFG. `size`: height and width in pixels, None for `square`; `steps`: 0 for the usual."""
        height, width = size or self.square
        return random_request(
            self.file.inputs,
            width=width,
            height=height,
            batch=1,
            text=self.subject.text,
            steps=steps or self.subject.steps,
            with_cfg=True,
        )

    def sample(
        self,
        strategy: ParallelStrategy = ALONE,
        *,
        size: tuple[int, int] | None = None,
        dtype: str = "auto",
        steps: int = 0,
        options: ComputeOptions = PLAIN,
        on_step: Callable[[int, int, Tensor | None], None] | None = None,
        limit_s: float = float("inf"),
    ) -> SampleResult:
        """Runs one job under `strategy`. Raises ParallelError if it does not end within `limit_s` seconds."""
        sidecar = self.group(strategy.world_size)
        limit_s = min(limit_s, self.seconds_left())
        deadline = time.monotonic() + limit_s
        try:
            return sidecar.sample(
                replace(self.spec, weight_dtype=dtype),
                self.request(size, steps),
                Placement(strategy, compute_options=options),
                on_step=on_step,
                should_cancel=lambda: time.monotonic() > deadline,
            )
        except Cancelled as error:
            raise ParallelError(
                f"{strategy.describe()} did not end within {limit_s:.0f} s ({error})"
            ) from None

    def expected(self, size: tuple[int, int] | None = None, dtype: str = "auto") -> SampleResult:
        """Returns the result of one device, which every strategy must reproduce. Computed once per size and dtype."""
        key = size or self.square, dtype
        if key not in self._expected:
            self._expected[key] = self.sample(size=size, dtype=dtype)
        return self._expected[key]

    def check(self, name: str, count: int) -> Iterator[Finding]:
        """Runs a check on the first `count` ranks themselves (rank/checks/gpu.py), which hold no model meanwhile."""
        sidecar = self.group(count)
        sidecar.sleep()
        for rank, findings in enumerate(sidecar.check(name, self.subject, self.seconds_left())):
            for found in findings:
                yield found if count == 1 else replace(found, name=f"{found.name}, process {rank}")

    def seconds_left(self) -> float:
        """Returns the seconds until `deadline`, 0 after it."""
        return max(0.0, self.deadline - time.monotonic())

    def memory(self, count: int) -> tuple[RankStatus, ...]:
        """Returns the status of each of `count` ranks, with the bytes that it holds."""
        return self.group(count).status().ranks

    def split(self) -> ParallelStrategy:
        """Returns the usual strategy to split a picture over `count` devices."""
        ulysses, ring = self.file.shape.split_sequence(self.count)
        return ParallelStrategy(ulysses_degree=ulysses, ring_degree=ring)


Examine = Callable[[Ranks], Iterable[Finding]]


@dataclass(frozen=True)
class Check:
    """One check. `name`: its name in --only; `examine`: the function that runs it; `needs_gpu`, `needs_two`: skipped
    without a GPU or without two devices; `limit_s`: seconds after which its jobs are ended and it is reported as
    broken."""

    name: str
    examine: Examine
    needs_gpu: bool = False
    needs_two: bool = False
    limit_s: float = USUAL_LIMIT

    def why_not(self, subject: CheckSubject) -> str:
        """Returns why the check cannot run on `subject`, or an empty string."""
        if self.needs_gpu and is_cpu(subject.devices):
            return f"{NO_GPU}: this is about CUDA alone"
        if self.needs_two and len(subject.devices) < 2:
            return "one device: it takes two"
        return ""


@contextmanager
def environment(name: str, value: str) -> Iterator[None]:
    """Sets an environment variable for the ranks that start meanwhile."""
    os.environ[name] = value
    try:
        yield
    finally:
        del os.environ[name]


def dtype_of(result: SampleResult) -> str:
    """Returns the dtype of LIMITS by which differences from `result` are judged: bfloat16 for all but float32."""
    load = result.info.load
    return "float32" if load is not None and load.compute_dtype == "float32" else "bfloat16"


def compared(name: str, result: SampleResult, expected: SampleResult, words: str) -> Finding:
    """Compares the latent of `result` with the expected one. `words`: text before the difference in the finding."""
    found, limit = largest_difference(result.latent, expected.latent), LIMITS[dtype_of(expected)]
    finding = f"{words}, largest difference {found:.1e} of the largest value"
    if found <= limit:
        return Finding(name, "ok", finding)
    return Finding(
        name,
        "broken",
        f"{finding}, where {limit:.0e} is rounding: pictures would differ",
        "report it with this text, and do without this way until then",
    )


def same_bits(name: str, result: SampleResult, expected: SampleResult, words: str) -> Finding:
    """Compares the latents bit by bit. A difference within rounding gets the status slow, any other one broken."""
    if result.latent.equal(expected.latent):
        return Finding(name, "ok", f"{words}: the same bits")
    found = compared(name, result, expected, words)
    if found.status != "ok":
        return found
    return replace(
        found, status="slow", remedy="report it: a kernel whose sums have no fixed order is in use"
    )


def steps_in_words(result: SampleResult) -> str:
    """Returns the milliseconds of each step, e.g. `31.0, 28.4, 28.5 ms`."""
    return f"{', '.join(f'{seconds * 1e3:.1f}' for seconds in result.info.step_seconds)} ms"


def gigabytes(size: float) -> str:
    return f"{size / 1e9:.2f} GB" if abs(size) >= 1e8 else f"{size / 1e6:.1f} MB"
