"""Fault cases of jobs: cancelled, many in a row, several at once, before and after a sleep, and with hostile input."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from subject import random_flux, ranks_on, sample_request

from fault_injection import (
    fault,
)
from hostile_bytes import FRAMES, PAYLOADS, damaged, parse_file, parse_frame, parse_heartbeat, parse_payload
from parallel_backend.sidecar.group import exchange, failures
from parallel_backend.sidecar.sidecar import Sidecar
from parallel_backend.wire import deadlines
from scripted import SLOW, ranks_of, scripted_request, scripted_sidecar

from .case import (
    DEVICES,
    RING,
    ULYSSES,
    Check,
    Subject,
    case,
    error_of,
    request,
    seconds_since,
    true,
    within,
)


@case("12", "cancel")
def cancels(subject: Subject) -> Iterator[Check]:
    weights, placement, steps = subject.scripted, ULYSSES, 8
    sidecar = scripted_sidecar()
    try:
        sidecar.load(weights)
        pids = sidecar.pids
        for after in (1, 4, steps):
            at = []

            def on_step(step: int, of: int, denoised: torch.Tensor | None, after=after, at=at) -> None:
                if step == after:
                    at.append(time.perf_counter())

            error_of(
                lambda on_step=on_step, at=at: sidecar.sample(
                    weights, scripted_request(SLOW, steps), placement, on_step, should_cancel=lambda: at != []
                )
            )
            # a step of these ranks takes 0.05 s
            yield within(
                f"after step {after} of {steps}: s to Cancelled", time.perf_counter() - at[0], 0.05 + 0.2
            )
        yield true("the group stayed warm", sidecar.pids == pids)
    finally:
        sidecar.stop()
    fired, normal, deadlines.CANCEL = subject.fired(), deadlines.CANCEL, 1.0
    try:
        with fault("sleep", "load", once=fired):
            error_of(
                lambda: sidecar.sample(weights, scripted_request(), placement, should_cancel=fired.exists)
            )
            yield within(
                "in a load that never ends, beyond 1 s: s to Cancelled", seconds_since(fired) - 1.0, 0.5
            )
        begun = time.perf_counter()
        error_of(
            lambda: sidecar.sample(
                weights, scripted_request(), placement, should_cancel=lambda: sidecar.pids != ()
            )
        )
        yield within("while starting: s to Cancelled", time.perf_counter() - begun, 0.5)
    finally:
        deadlines.CANCEL = normal
        sidecar.stop()


@case("13", "cancel races a crash")
def races(subject: Subject) -> Iterator[Check]:
    normal, failures.FAILURES_UNTIL_BROKEN = failures.FAILURES_UNTIL_BROKEN, 1000
    sidecar, outcomes = scripted_sidecar(), []
    try:
        for number in range(10):
            sidecar.load(subject.scripted)
            killer = threading.Timer(0.008 * number, os.kill, (sidecar.pids[1], signal.SIGKILL))

            def on_step(
                step: int, of: int, denoised: torch.Tensor | None, killer: threading.Timer = killer
            ) -> None:
                if step == 2:
                    killer.start()

            outcomes.append(
                error_of(
                    lambda on_step=on_step, killer=killer: sidecar.sample(
                        subject.scripted,
                        scripted_request(SLOW, 20),
                        ULYSSES,
                        on_step,
                        should_cancel=lambda: killer.ident is not None,
                    )
                )
            )
            time.sleep(0.1)
    finally:
        failures.FAILURES_UNTIL_BROKEN = normal
        sidecar.stop()
    yield true("ten races, ten errors", all(outcomes) and len(outcomes) == 10)
    yield Check("of which were crashes", sum("SIGKILL" in text for text in outcomes))


@case("15", "jobs in a row, alternating sizes, strategies and models")
def many_jobs(subject: Subject) -> Iterator[Check]:
    shape = [sample_request(tokens, steps=2) for tokens in (16, 128)]
    with random_flux(heads=2, double_blocks=1, single_blocks=2) as other, ranks_on(*DEVICES) as sidecar:
        begun = time.perf_counter()
        for number in range(subject.jobs):
            # The model changes every eight jobs and the strategy every four: a load takes longer than a small job.
            spec = (subject.flux, other)[number // 8 % 2]
            placement = (ULYSSES, RING)[number // 4 % 2]
            sidecar.sample(spec, shape[number % 2], placement)
            if number == subject.jobs // 5:
                warm = usage(sidecar)
        last = usage(sidecar)
        yield Check(f"s for {subject.jobs} jobs", time.perf_counter() - begun)
    for what in ("descriptors", "processes"):
        yield Check(f"{what} more than after a fifth of the jobs", last[what] - warm[what], 0)
    for what in ("parent MiB", "rank 0 MiB", "rank 1 MiB"):
        yield Check(
            f"{what} more than after a fifth of the jobs, %", 100 * (last[what] / warm[what] - 1), 2.0
        )
        yield Check(f"{what} at the end", last[what])


@case("16", "hostile frames, payloads and files")
def hostile(subject: Subject) -> Iterator[Check]:
    weights = subject.scripted
    sidecar = scripted_sidecar()
    try:
        sidecar.load(weights)
        pids, pack = sidecar.pids, exchange.pack_tensors
        for name, tensors in {
            "NaN": {"noise": torch.full((1, 4, 6, 6), float("nan"))},
            "another shape": {"noise": torch.zeros(1, 4, 6, 600)},
            "a tensor too many": {"more": torch.zeros(1)},
        }.items():
            exchange.pack_tensors = lambda good, bad=tensors: pack({**good, **bad})
            try:
                text = error_of(lambda: sidecar.sample(weights, scripted_request(), ULYSSES))
            finally:
                exchange.pack_tensors = pack
            yield true(f"{name} is refused, the group alive", bool(text) and sidecar.pids == pids)
    finally:
        sidecar.stop()
    each = subject.inputs // 4
    original = Path(subject.flux.path).read_bytes()[: 2**15]
    path = subject.folder / "hostile.safetensors"
    for name, inputs, parse in (
        ("frames", damaged(FRAMES), parse_frame),
        ("payloads", damaged(PAYLOADS), parse_payload),
        ("files", damaged([original, *PAYLOADS]), lambda data: parse_file(data, path)),
        ("notes of ranks", st.binary(min_size=1, max_size=200), parse_heartbeat),
    ):
        tried, crash = parse_many(inputs, parse, each)
        yield Check(f"{name}: inputs", tried)
        yield true(f"{name}: nothing but refusals {crash}", not crash)


def parse_many(
    inputs: st.SearchStrategy[bytes], parse: Callable[[bytes], None], most: int
) -> tuple[int, str]:
    """Returns (the number of inputs that were parsed, the first error that is no refusal, or "" without one)."""
    tried = 0

    @settings(max_examples=most, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(inputs)
    def check(data: bytes) -> None:
        nonlocal tried
        tried += 1
        parse(data)

    try:
        check()
    except Exception as error:
        return tried, f"{type(error).__name__}: {error}"
    return tried, ""


@case("21", "two prompts at once; two groups side by side")
def side_by_side(subject: Subject) -> Iterator[Check]:
    requests = [request(noise=torch.full_like(request().noise, 0.1 * number)) for number in range(4)]
    with ranks_on(*DEVICES) as one, ranks_on("cpu:2", "cpu:3") as other:
        expected = [one.sample(subject.flux, each, ULYSSES).latent for each in requests]
        found: dict[tuple[int, int], torch.Tensor] = {}

        def ask(sidecar: Sidecar, group: int, number: int) -> None:
            found[group, number] = sidecar.sample(subject.flux, requests[number], ULYSSES).latent

        threads = [
            threading.Thread(target=ask, args=(sidecar, group, number))
            for group, sidecar in enumerate((one, other))
            for number in range(len(requests))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    same = all(torch.equal(latent, expected[number]) for (_, number), latent in found.items())
    yield true("eight answers, none mixed", len(found) == 8 and same)


@case("sleep", "sleep and wake")
def sleep(subject: Subject) -> Iterator[Check]:
    with ranks_on(*DEVICES) as sidecar:
        before = sidecar.sample(subject.flux, request(), ULYSSES).latent
        for name, act in (("sleep", sidecar.sleep), ("wake", sidecar.wake)):
            begun = time.monotonic()
            act()
            yield Check(f"s to {name}", time.monotonic() - begun)
        after = sidecar.sample(subject.flux, request(), ULYSSES).latent
        yield true("the next job is bit-equal", torch.equal(before, after))


def usage(sidecar: Sidecar) -> dict[str, float]:
    """Returns this process's descriptors and rank processes, and the anonymous memory of it and its ranks in MiB."""
    found = {
        "descriptors": float(len(os.listdir("/proc/self/fd"))),  # noqa: PTH208, names are enough
        "processes": float(len(ranks_of(os.getpid()))),
        "parent MiB": resident(os.getpid()),
    }
    return found | {f"rank {rank} MiB": resident(pid) for rank, pid in enumerate(sidecar.pids)}


def resident(pid: int) -> float:
    """Returns the process's anonymous memory in MiB. Mapped weight files belong to the page cache and do not count."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("RssAnon:"))
