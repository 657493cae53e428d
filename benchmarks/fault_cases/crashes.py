"""Fault cases in which ranks or their parent die or hang, and the jobs after that."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator

import torch
from subject import ranks_on

from fault_injection import (
    OUT_OF_HOST_MEMORY,
    fault,
    in_control_group,
    run_script,
    start_script,
)
from parallel_backend.errors import DeviceError, OutOfMemory, RankFailed
from parallel_backend.sidecar.group import failures
from parallel_backend.sidecar.group.lease import State
from parallel_backend.wire import deadlines
from scripted import is_running, ranks_of, scripted_request, scripted_sidecar

from .case import (
    DEVICES,
    PIPELINE,
    READY,
    RING,
    ULYSSES,
    Check,
    Subject,
    after_a_fault,
    case,
    error_of,
    request,
    true,
    within,
)


@case("1", "SIGKILL of a rank, idle")
def killed_idle(subject: Subject) -> Iterator[Check]:
    with ranks_on(*DEVICES) as sidecar:
        before = sidecar.sample(subject.flux, request(), ULYSSES).latent
        victim, survivor = sidecar.pids
        begun = time.perf_counter()
        os.kill(victim, signal.SIGKILL)
        while sidecar.state is not State.FAILED or is_running(survivor):
            time.sleep(0.001)
        yield within("s until noticed", time.perf_counter() - begun, 0.5)
        begun = time.perf_counter()
        sidecar.start()
        yield within("s to ready", time.perf_counter() - begun, READY)
        after = sidecar.sample(subject.flux, request(), ULYSSES).latent
        yield true("the next job is bit-equal", torch.equal(before, after))


@case("2", "SIGKILL in an all-to-all, in a ring step, in a PipeFusion hop")
def killed_in_collectives(subject: Subject) -> Iterator[Check]:
    for placement, point in (
        (ULYSSES, "an all-to-all"),
        (RING, "a ring step"),
        (PIPELINE, "a PipeFusion hop"),
    ):
        yield from after_a_fault(
            subject, placement, "kill", point, RankFailed, words="process 1 failed: killed by SIGKILL"
        )


@case("3", "segfault, abort")
def signals(subject: Subject) -> Iterator[Check]:
    for kind, name in (("segfault", "SIGSEGV"), ("abort", "SIGABRT")):
        words = f"process 1 failed: killed by {name}"
        yield from after_a_fault(subject, ULYSSES, kind, "an all-to-all", RankFailed, words=words)


@case("4", "the host's OOM killer")
def host_memory(subject: Subject) -> Iterator[Check]:
    with in_control_group(1500 * 2**20) as join:
        if join is None:
            return
        out = run_script(OUT_OF_HOST_MEMORY, subject.folder, join)
    yield true(
        "says host memory and how much", "host memory ran out" in out and "of the 1.5 GiB there are" in out
    )
    yield true("the next job works", "fine" in out)


@case("5", "an out-of-memory exception on one rank")
def out_of_memory(subject: Subject) -> Iterator[Check]:
    yield from after_a_fault(
        subject, ULYSSES, "oom", "an all-to-all", OutOfMemory, words="Process 1 ran out of memory"
    )


@case("6-8", "a rank sleeps in a collective; SIGSTOP; holds the GIL")
def hangs(subject: Subject) -> Iterator[Check]:
    normal = deadlines.step_budget
    for kind in ("sleep", "stop", "gil"):
        deadlines.step_budget = lambda earlier: 1.0 if earlier else 60.0  # the first step loads libraries
        try:
            yield from after_a_fault(
                subject,
                ULYSSES,
                kind,
                "an all-to-all",
                RankFailed,
                words="missed in an all-to-all by process 0",
                allowed=1.0,
            )
        finally:
            deadlines.step_budget = normal


@case("9", "ComfyUI killed, idle, loading, sampling")
def comfyui_killed(subject: Subject) -> Iterator[Check]:
    for point in ("idle", "load", "an all-reduce"):
        fired = subject.fired()
        script = f"""
            sidecar = scripted_sidecar()
            with fault("gil", {point!r}, once=Path({str(fired)!r})):
                sidecar.start()
                sidecar.sample(weights, scripted_request(), two_ranks())
            """
        with start_script(script, subject.folder) as parent:
            while not fired.exists():
                time.sleep(0.01)
            parent.kill()
            begun = time.perf_counter()
            parent.wait()
            while ranks_of(parent.pid):
                time.sleep(0.01)
        yield within(f"at {point}: s until no rank is left", time.perf_counter() - begun, 2.0)


@case("10", "the thread that started the group ends")
def starter_ends(subject: Subject) -> Iterator[Check]:
    with ranks_on(*DEVICES) as sidecar:
        starter = threading.Thread(target=sidecar.start)
        starter.start()
        starter.join()
        time.sleep(0.5)
        yield true("both ranks live", len(sidecar.pids) == 2 and all(map(is_running, sidecar.pids)))
        sidecar.sample(subject.flux, request(), ULYSSES)


@case("19", "three crashes in ten minutes")
def broken(subject: Subject) -> Iterator[Check]:
    sidecar = scripted_sidecar()
    try:
        with fault("kill", "an all-reduce", step=1):
            for _ in range(failures.FAILURES_UNTIL_BROKEN):
                error_of(lambda: sidecar.sample(subject.scripted, scripted_request(), ULYSSES))
        begun = time.perf_counter()
        text = error_of(lambda: sidecar.sample(subject.scripted, scripted_request(), ULYSSES))
        yield within("s to the refusal", time.perf_counter() - begun, 0.5)
        yield true("BROKEN, with the history", sidecar.state is State.BROKEN and text.count("SIGKILL") == 3)
        sidecar.stop()
        sidecar.sample(subject.scripted, scripted_request(), ULYSSES)
        yield true("a reset lets it start again", sidecar.state is State.READY)
    finally:
        sidecar.stop()


@case("20", "a device disappears")
def device_gone(subject: Subject) -> Iterator[Check]:
    name = f"cuda:{torch.cuda.device_count()}"
    with ranks_on(name) as sidecar:
        text = error_of(sidecar.start, DeviceError)
    yield true("it is named, with what to do", f"{name} is not there" in text and "Take it out" in text)
