"""Every way to fail, done on purpose and timed: what docs/reliability.md promises, case by case.

    python benchmarks/faults.py [--only 2,6] [--jobs 1000] [--inputs 20000] [--json]

Each case starts its own ranks (two on the CPU), does its worst, and then looks whether the next job gives the bits of
one before. A check passes when its value is at most its limit. Times depend on what else the machine does.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from subject import finish, random_flux, sample_request

from fault_injection import (
    BESIDE_OTHERS,
    FEW_DESCRIPTORS,
    ONE_JOB,
    OUT_OF_HOST_MEMORY,
    fault,
    full_temporary_folder,
    in_control_group,
    run_script,
    start_in,
    start_script,
    without_hostname,
)
from hostile_bytes import FRAMES, PAYLOADS, damaged, parse_file, parse_frame, parse_heartbeat, parse_payload
from parallel_backend.errors import DeviceError, OutOfMemory, ParallelError, RankFailed
from parallel_backend.requests import ModelSpec, Placement, SamplerState
from parallel_backend.sidecar import restart_policy as crash_history
from parallel_backend.sidecar import sidecar as client
from parallel_backend.sidecar.sidecar import Sidecar, State
from parallel_backend.strategy import ParallelStrategy
from parallel_backend.wire import deadlines
from parallel_backend.wire.payloads import state_tensors
from parallel_backend.wire.protocol import VERSION
from parallel_backend.wire.transport import pack_tensors
from scripted import SLOW, is_running, ranks_of, scripted_request, scripted_sidecar, scripted_weights

ULYSSES = Placement(ParallelStrategy(ulysses_degree=2))
RING = Placement(ParallelStrategy(ring_degree=2))
PIPELINE = Placement(ParallelStrategy(pipefusion_degree=2, warmup_steps=2))
DEVICES = ("cpu:0", "cpu:1")
READY = 3.0  # s, limit of a restart without its load


@dataclass(frozen=True)
class Check:
    """One thing that was looked at; `limit` None: only measured."""

    what: str
    value: float
    limit: float | None = None

    @property
    def passed(self) -> bool:
        return self.limit is None or self.value <= self.limit


@dataclass(frozen=True)
class Subject:
    """What the cases run on: a random Flux, a folder, and how much of the long cases."""

    flux: ModelSpec
    folder: Path
    jobs: int
    inputs: int

    def fired(self) -> Path:
        """A file that is not there yet, for a fault to leave as it fires."""
        return Path(tempfile.mkdtemp(dir=self.folder)) / "fired"

    @property
    def scripted(self) -> ModelSpec:
        return scripted_weights(self.folder / "good.safetensors", "good 0.5")


Case = Callable[[Subject], Iterator[Check]]
CASES: dict[str, tuple[str, Case]] = {}


def case(number: str, title: str) -> Callable[[Case], Case]:
    def register(run: Case) -> Case:
        CASES[number] = (title, run)
        return run

    return register


def true(what: str, fact: bool) -> Check:
    """A check of a fact: 0 is as it should be."""
    return Check(what, 0.0 if fact else 1.0, 0.0)


@contextmanager
def ranks(*, resumes: bool = False, devices: tuple[str, ...] = DEVICES) -> Iterator[Sidecar]:
    sidecar = Sidecar(devices, resumes=resumes)
    try:
        yield sidecar
    finally:
        sidecar.stop()


def seconds_since(fired: Path) -> float:
    return time.time() - fired.stat().st_mtime_ns / 1e9


def request(**changes):
    return replace(sample_request(128, steps=6), **changes)


def after_a_fault(
    subject: Subject,
    placement: Placement,
    kind: str,
    point: str,
    expected: type[ParallelError],
    *,
    words: str = "",
    allowed: float = 0.0,
) -> Iterator[Check]:
    """A job meets a fault: how long until the error, until the next job can run, and whether its bits are the same."""
    fired, caught = subject.fired(), None
    with ranks() as sidecar:
        with fault(kind, point, step=2, once=fired):
            sidecar.start()
        try:
            sidecar.sample(subject.flux, request(), placement)
        except ParallelError as error:
            error_s, caught = seconds_since(fired), error
        begun = time.perf_counter()
        sidecar.start()
        ready_s = time.perf_counter() - begun
        load_s = sidecar.load(subject.flux, placement.strategy).seconds
        one = sidecar.sample(subject.flux, request(), placement).latent
        other = sidecar.sample(subject.flux, request(), placement).latent
    name = f"{kind} in {point}"
    yield true(f"{name}: {expected.__name__} {words}", type(caught) is expected and words in str(caught))
    yield Check(
        f"{name}: s to the error" + (f" beyond {allowed:g} s" if allowed else ""), error_s - allowed, 0.5
    )
    yield Check(f"{name}: s to ready", ready_s, READY)
    yield Check(f"{name}: s to load", load_s)
    yield true(f"{name}: the next jobs are bit-equal", torch.equal(one, other))


@case("1", "SIGKILL of a rank, idle")
def killed_idle(subject: Subject) -> Iterator[Check]:
    with ranks() as sidecar:
        before = sidecar.sample(subject.flux, request(), ULYSSES).latent
        victim, survivor = sidecar.pids
        begun = time.perf_counter()
        os.kill(victim, signal.SIGKILL)
        while sidecar.state is not State.FAILED or is_running(survivor):
            time.sleep(0.001)
        yield Check("s until noticed", time.perf_counter() - begun, 0.5)
        begun = time.perf_counter()
        sidecar.start()
        yield Check("s to ready", time.perf_counter() - begun, READY)
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
            subject, placement, "kill", point, RankFailed, words="rank 1 failed: killed by SIGKILL"
        )


@case("3", "segfault, abort")
def signals(subject: Subject) -> Iterator[Check]:
    for kind, name in (("segfault", "SIGSEGV"), ("abort", "SIGABRT")):
        words = f"rank 1 failed: killed by {name}"
        yield from after_a_fault(subject, ULYSSES, kind, "an all-to-all", RankFailed, words=words)


@case("4", "the host's OOM killer")
def host_memory(subject: Subject) -> Iterator[Check]:
    with in_control_group(1500 * 2**20) as join:
        if join is None:
            return
        out = run_script(join + OUT_OF_HOST_MEMORY, subject.folder)
    yield true(
        "says host memory and how much", "host memory ran out" in out and "of the 1.5 GiB there are" in out
    )
    yield true("the next job works", "fine" in out)


@case("5", "an out-of-memory exception on one rank")
def out_of_memory(subject: Subject) -> Iterator[Check]:
    yield from after_a_fault(
        subject, ULYSSES, "oom", "an all-to-all", OutOfMemory, words="Rank 1 ran out of memory"
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
                words="missed in an all-to-all by rank 0",
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
        yield Check(f"at {point}: s until no rank is left", time.perf_counter() - begun, 2.0)


@case("10", "the thread that started the group ends")
def starter_ends(subject: Subject) -> Iterator[Check]:
    with ranks() as sidecar:
        starter = threading.Thread(target=sidecar.start)
        starter.start()
        starter.join()
        time.sleep(0.5)
        yield true("both ranks live", len(sidecar.pids) == 2 and all(map(is_running, sidecar.pids)))
        sidecar.sample(subject.flux, request(), ULYSSES)


@case("11", "a rank fails to import; never becomes ready; two ranks want one device")
def bad_starts(subject: Subject) -> Iterator[Check]:
    sidecar = Sidecar(DEVICES, rank_module="tests.support.rank_programs.broken_rank")
    yield true(
        "the traceback of an import is shown", "a_library_that_is_not_installed" in error_of(sidecar.start)
    )
    sidecar.stop()
    fired = subject.fired()
    with ranks() as sidecar, fault("raise", "start", once=fired):
        text = error_of(sidecar.start)
        yield Check("s from a failure at the start to the error", seconds_since(fired), 1.0)
        yield true("its traceback is shown", "a fault on purpose" in text)
        yield true("nothing is left", sidecar.pids == ())
    yield true(
        "one device twice is refused", "named twice" in error_of(lambda: Sidecar(("cuda:0", "cuda:0")))
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
                    sidecar.cancel()
                    sidecar.cancel()  # twice is once

            error_of(
                lambda on_step=on_step: sidecar.sample(
                    weights, scripted_request(SLOW, steps), placement, on_step
                )
            )
            # a step of these ranks takes 0.05 s
            yield Check(
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
            yield Check(
                "in a load that never ends, beyond 1 s: s to Cancelled", seconds_since(fired) - 1.0, 0.5
            )
        begun = time.perf_counter()
        error_of(
            lambda: sidecar.sample(
                weights, scripted_request(), placement, should_cancel=lambda: sidecar.pids != ()
            )
        )
        yield Check("while starting: s to Cancelled", time.perf_counter() - begun, 0.5)
    finally:
        deadlines.CANCEL = normal
        sidecar.stop()


@case("13", "cancel races a crash")
def races(subject: Subject) -> Iterator[Check]:
    normal, crash_history.FAILURES_UNTIL_BROKEN = crash_history.FAILURES_UNTIL_BROKEN, 1000
    sidecar, outcomes = scripted_sidecar(), []
    try:
        for number in range(10):
            sidecar.load(subject.scripted)

            def on_step(
                step: int, of: int, denoised: torch.Tensor | None, delay: float = 0.008 * number
            ) -> None:
                if step == 2:
                    threading.Timer(delay, os.kill, (sidecar.pids[1], signal.SIGKILL)).start()
                    sidecar.cancel()

            outcomes.append(
                error_of(
                    lambda on_step=on_step: sidecar.sample(
                        subject.scripted, scripted_request(SLOW, 20), ULYSSES, on_step
                    )
                )
            )
            time.sleep(0.1)
    finally:
        crash_history.FAILURES_UNTIL_BROKEN = normal
        sidecar.stop()
    yield true("ten races, ten errors", all(outcomes) and len(outcomes) == 10)
    yield Check("of which were crashes", sum("SIGKILL" in text for text in outcomes))


@case("14", "/dev/shm of 1 MB, 256 descriptors, a read-only or full temporary folder")
def narrow_machine(subject: Subject) -> Iterator[Check]:
    yield true("256 descriptors are enough", "fine" in run_script(FEW_DESCRIPTORS + ONE_JOB, subject.folder))
    yield true(
        "a read-only folder is refused",
        "/proc takes no files" in run_script(start_in("/proc"), subject.folder),
    )
    full = subject.folder / "full"
    if (before := full_temporary_folder(full)) is not None:
        out = run_script(ONE_JOB + start_in(full), subject.folder, before)
        yield true("1 MB of /dev/shm is enough", "fine" in out)
        yield true("a full folder is refused", "No space left" in out)


@case("15", "jobs in a row, alternating sizes, strategies and models")
def many_jobs(subject: Subject) -> Iterator[Check]:
    shape = [
        replace(sample_request(tokens, steps=2), sampler=name)
        for tokens, name in ((16, "euler"), (128, "dpmpp_2m"))
    ]
    with random_flux(heads=2, double_blocks=1, single_blocks=2) as other, ranks() as sidecar:
        begun = time.perf_counter()
        for number in range(subject.jobs):
            # A model and its split stay for four jobs: a load of this little model takes longer than a job.
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
        pids, pack = sidecar.pids, client.pack_tensors
        for name, tensors in {
            "NaN": {"noise": torch.full((1, 4, 6, 6), float("nan"))},
            "another shape": {"noise": torch.zeros(1, 4, 6, 600)},
            "a tensor too many": {"more": torch.zeros(1)},
        }.items():
            client.pack_tensors = lambda good, bad=tensors: pack({**good, **bad})
            try:
                text = error_of(lambda: sidecar.sample(weights, scripted_request(), ULYSSES))
            finally:
                client.pack_tensors = pack
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
    """How many inputs were parsed, and the first error that is no refusal."""
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


@case("17", "another version on the ranks")
def versions(subject: Subject) -> Iterator[Check]:
    sidecar = Sidecar(("cpu:0",), rank_module="tests.support.rank_programs.old_rank")
    begun = time.perf_counter()
    text = error_of(sidecar.start)
    yield Check("s to the refusal, the import of torch included", time.perf_counter() - begun, 1.0 + READY)
    yield true("both versions are named", f"it runs protocol {VERSION + 1}" in text)
    sidecar.stop()


@case("18", "a stale folder, port 29500 taken, two ComfyUIs at once, a hostname that does not resolve")
def beside_others(subject: Subject) -> Iterator[Check]:
    before = without_hostname()
    with (
        start_script(BESIDE_OTHERS, subject.folder, before) as one,
        start_script(BESIDE_OTHERS, subject.folder, before) as other,
    ):
        outs = [process.communicate(timeout=120)[0] for process in (one, other)]
    yield true("no effect", all("fine" in out for out in outs))


@case("19", "three crashes in ten minutes")
def broken(subject: Subject) -> Iterator[Check]:
    sidecar = scripted_sidecar()
    try:
        with fault("kill", "an all-reduce", step=1):
            for _ in range(crash_history.FAILURES_UNTIL_BROKEN):
                error_of(lambda: sidecar.sample(subject.scripted, scripted_request(), ULYSSES))
        begun = time.perf_counter()
        text = error_of(lambda: sidecar.sample(subject.scripted, scripted_request(), ULYSSES))
        yield Check("s to the refusal", time.perf_counter() - begun, 0.5)
        yield true("BROKEN, with the history", sidecar.state is State.BROKEN and text.count("SIGKILL") == 3)
        sidecar.stop()
        sidecar.sample(subject.scripted, scripted_request(), ULYSSES)
        yield true("a reset lets it start again", sidecar.state is State.READY)
    finally:
        sidecar.stop()


@case("20", "a device disappears")
def device_gone(subject: Subject) -> Iterator[Check]:
    name = f"cuda:{torch.cuda.device_count()}"
    with ranks(devices=(name,)) as sidecar:
        text = error_of(sidecar.start, DeviceError)
    yield true("it is named, with what to do", f"{name} is not there" in text and "Take it out" in text)


@case("21", "two prompts at once; two groups side by side")
def side_by_side(subject: Subject) -> Iterator[Check]:
    requests = [request(seed=seed, noise=torch.full_like(request().noise, 0.1 * seed)) for seed in range(4)]
    with ranks() as one, ranks(devices=("cpu:2", "cpu:3")) as other:
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


@case("resume", "killed at every step of ten, each sampler")
def resume(subject: Subject) -> Iterator[Check]:
    normal, crash_history.FAILURES_UNTIL_BROKEN = crash_history.FAILURES_UNTIL_BROKEN, 1000
    back_off, deadlines.BACK_OFF = deadlines.BACK_OFF, 0.0
    try:
        for sampler in ("euler", "euler_ancestral", "heun", "dpmpp_2m"):
            job, equal, resumed_at = replace(scripted_request(SLOW, steps=10), sampler=sampler), 0, []
            sidecar = scripted_sidecar(resumes=True)
            try:
                whole = sidecar.sample(subject.scripted, job, ULYSSES).latent
                for step in range(1, 11):
                    sidecar.stop()
                    with fault("kill", "step", rank=step % 2, step=step, once=subject.fired()):
                        result = sidecar.sample(subject.scripted, job, ULYSSES)
                    (note,) = result.info.notes
                    equal += torch.equal(result.latent, whole)
                    resumed_at.append(
                        step - int(note.split("after step ")[1].split()[0]) if "after step" in note else step
                    )
            finally:
                sidecar.stop()
            yield Check(f"{sampler}: of 10 jobs not bit-equal", 10 - equal, 0)
            yield Check(f"{sampler}: steps that ran again, median", median(resumed_at))
    finally:
        crash_history.FAILURES_UNTIL_BROKEN, deadlines.BACK_OFF = normal, back_off
    for name, images in (("1024 x 1024", 1), ("four of 1024 x 1024", 4)):
        x = torch.randn(images, 16, 128, 128)
        state = SamplerState(1, x, x.clone(), torch.Generator().get_state())
        times = []
        for _ in range(30):
            begun = time.perf_counter()
            os.close(pack_tensors(state_tensors(state)))
            times.append(time.perf_counter() - begun)
        yield Check(f"state of {name}: ms to send", 1e3 * median(times))


@case("sleep", "sleep and wake")
def sleep(subject: Subject) -> Iterator[Check]:
    with ranks() as sidecar:
        before = sidecar.sample(subject.flux, request(), ULYSSES).latent
        for level in (1, 2):
            slept, woke = sidecar.sleep(level), sidecar.wake()
            yield Check(f"level {level}: s to sleep", slept.seconds)
            yield Check(f"level {level}: s to wake", woke.seconds)
            yield Check(f"level {level}: device MiB given back", slept.freed_bytes / 2**20)
            after = sidecar.sample(subject.flux, request(), ULYSSES).latent
            yield true(f"level {level}: the next job is bit-equal", torch.equal(before, after))


def error_of(call: Callable[[], object], kind: type[ParallelError] = ParallelError) -> str:
    """The words of the one error that `call` raises; empty when it raises none, or another."""
    try:
        call()
    except kind as error:
        return str(error)
    return ""


def usage(sidecar: Sidecar) -> dict[str, float]:
    """Descriptors and processes of this process, and resident memory of it and its ranks."""
    found = {
        "descriptors": float(len(os.listdir("/proc/self/fd"))),  # noqa: PTH208, names are enough
        "processes": float(len(ranks_of(os.getpid()))),
        "parent MiB": resident(os.getpid()),
    }
    return found | {f"rank {rank} MiB": resident(pid) for rank, pid in enumerate(sidecar.pids)}


def resident(pid: int) -> float:
    """MiB of memory of the process' own; what it maps of weights' files belongs to the page cache."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("RssAnon:"))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="cases, by their numbers, with commas between")
    parser.add_argument("--jobs", type=int, default=1000, help="of case 15")
    parser.add_argument("--inputs", type=int, default=20_000, help="of case 16")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    chosen = [number for number in args.only.split(",") if number] or list(CASES)
    unknown = [number for number in chosen if number not in CASES]
    if unknown:
        parser.error(f"no case {unknown[0]}; there are {', '.join(CASES)}")
    results = {}
    with (
        random_flux(heads=2, double_blocks=1, single_blocks=1) as flux,
        tempfile.TemporaryDirectory() as folder,
    ):
        subject = Subject(flux, Path(folder), args.jobs, args.inputs)
        for number in chosen:
            title, run = CASES[number]
            before = (len(os.listdir("/proc/self/fd")), set(os.listdir("/dev/shm")))  # noqa: PTH208
            checks = list(run(subject))
            after = (len(os.listdir("/proc/self/fd")), set(os.listdir("/dev/shm")))  # noqa: PTH208
            if results:  # the first case also starts the supervisor, which lasts
                checks.append(true("descriptors and /dev/shm as before", after == before))
            checks.append(true("no rank left", not ranks_of(os.getpid())))
            passed = all(check.passed for check in checks)
            results[number] = {
                "title": title,
                "passed": passed,
                "checks": [asdict(check) | {"passed": check.passed} for check in checks],
            }
            print(f"{number:>6}  {'pass' if passed else 'FAIL'}  {title}", flush=True)
            for check in checks:
                limit = "" if check.limit is None else f"  (limit {check.limit:g})"
                if check.limit != 0 or not check.passed:
                    print(
                        f"{'':14}{'' if check.passed else 'FAIL '}{check.what}: {check.value:.3g}{limit}",
                        flush=True,
                    )
    finish({"cases": results, "passed": all(entry["passed"] for entry in results.values())}, args.json)
    if not all(entry["passed"] for entry in results.values()):
        sys.exit(1)


if __name__ == "__main__":
    main()
