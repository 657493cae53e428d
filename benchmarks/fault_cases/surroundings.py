"""Fault cases of starts that cannot succeed, and of machines with few resources, old versions or other programs."""

from __future__ import annotations

import time
from collections.abc import Iterator

from subject import ranks_on

from fault_injection import (
    BESIDE_OTHERS,
    FEW_DESCRIPTORS,
    ONE_JOB,
    fault,
    full_temporary_folder,
    run_script,
    start_script,
    without_hostname,
)
from parallel_backend.sidecar.sidecar import Sidecar
from parallel_backend.wire.protocol import VERSION

from .case import (
    DEVICES,
    READY,
    Check,
    Subject,
    case,
    error_of,
    seconds_since,
    true,
    within,
)


@case("11", "a rank fails to import; never becomes ready; two ranks want one device")
def bad_starts(subject: Subject) -> Iterator[Check]:
    sidecar = Sidecar(DEVICES, rank_module="tests.support.rank_programs.broken_rank")
    yield true(
        "the traceback of an import is shown", "a_library_that_is_not_installed" in error_of(sidecar.start)
    )
    sidecar.stop()
    fired = subject.fired()
    with ranks_on(*DEVICES) as sidecar, fault("raise", "start", once=fired):
        text = error_of(sidecar.start)
        yield within("s from a failure at the start to the error", seconds_since(fired), 1.0)
        yield true("its traceback is shown", "a fault on purpose" in text)
        yield true("nothing is left", sidecar.pids == ())
    yield true(
        "one device twice is refused", "named twice" in error_of(lambda: Sidecar(("cuda:0", "cuda:0")))
    )


@case("14", "/dev/shm of 1 MB, 256 descriptors, a full temporary folder")
def narrow_machine(subject: Subject) -> Iterator[Check]:
    yield true("256 descriptors are enough", "fine" in run_script(FEW_DESCRIPTORS + ONE_JOB, subject.folder))
    if (before := full_temporary_folder(subject.folder / "full")) is not None:
        out = run_script(ONE_JOB, subject.folder, before)
        yield true("1 MB of /dev/shm is enough, and no temporary folder", "fine" in out)


@case("17", "another version on the ranks")
def versions(subject: Subject) -> Iterator[Check]:
    sidecar = Sidecar(("cpu:0",), rank_module="tests.support.rank_programs.old_rank")
    begun = time.perf_counter()
    text = error_of(sidecar.start)
    yield within("s to the refusal, the import of torch included", time.perf_counter() - begun, 1.0 + READY)
    yield true("both versions are named", f"it runs protocol {VERSION + 1}" in text)
    sidecar.stop()


@case("18", "port 29500 taken, two ComfyUIs at once, a hostname that does not resolve")
def beside_others(subject: Subject) -> Iterator[Check]:
    before = without_hostname()
    folders = [subject.folder / name for name in ("one", "other")]  # a job ends if its model file changes
    for folder in folders:
        folder.mkdir()
    with (
        start_script(BESIDE_OTHERS, folders[0], before) as one,
        start_script(BESIDE_OTHERS, folders[1], before) as other,
    ):
        outs = [process.communicate(timeout=120)[0] for process in (one, other)]
    yield true("no effect", all("fine" in out for out in outs))
