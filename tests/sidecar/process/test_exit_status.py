"""Descriptions of how a process ended."""

import pytest

from parallel_backend.sidecar.process.exit_status import count_oom_kills, describe_exit, written_stack


def exit_status(code, output=b"", oom_kills=0, peak_bytes=3 * 2**30):
    return describe_exit(code, output, oom_kills=oom_kills, peak_bytes=peak_bytes)


@pytest.fixture(autouse=True)
def memory_of_this_host(monkeypatch):
    monkeypatch.setattr("parallel_backend.sidecar.process.exit_status.host_memory", lambda: 8 * 2**30)


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (1, "exited with code 1"),
        (-11, "killed by SIGSEGV"),
        (-9, "killed by SIGKILL"),
        (-63, "killed by signal 63"),
    ],
)
def test_codes_and_signals_have_names(code, words):
    assert exit_status(code).words == words
    assert exit_status(code).reason == ("exit" if code > 0 else "signal")


def test_a_process_that_something_else_collected_has_no_code():
    unknown = exit_status(None, b"its last words")
    assert "something else in ComfyUI's process collected" in unknown.words
    assert unknown.words.endswith("its last words") and unknown.reason == "exit"


def test_a_kill_counts_as_out_of_memory_when_the_system_says_so():
    killed = exit_status(-9, oom_kills=1)
    assert killed.reason == "out_of_memory" and killed.repeats
    assert "host memory ran out" in killed.words and "3.0 GiB of the 8.0 GiB" in killed.words
    assert exit_status(-9, oom_kills=1, peak_bytes=2**28).reason == "signal"  # the kill hit another process
    assert exit_status(-11, oom_kills=1).reason == "signal"
    silent = exit_status(-9, oom_kills=None)
    assert silent.reason == "signal" and "the system does this when memory runs out" in silent.words


def test_the_last_lines_are_shown_and_of_a_crash_the_innermost_frames():
    lines = b"\n".join(b"line %d" % i for i in range(100))
    said, *shown = exit_status(1, lines).words.splitlines()
    assert said == "exited with code 1" and shown == [f"line {i}" for i in range(88, 100)]
    crash = lines + b"\nFatal Python error: Segmentation fault\n\n" + lines
    _, *shown = exit_status(-11, crash).words.splitlines()
    assert shown[:2] == ["Fatal Python error: Segmentation fault", "line 0"]


# Taken from issues of SGLang (3204), vLLM (8177) and open-r1 (620).
_ABORTED = """[rank0]:[E728 ProcessGroupNCCL.cpp:1896] [PG ID 0 PG GUID 0(default_pg) Rank 0] Process group watchdog
terminate called after throwing an instance of 'c10::DistBackendError'
  what():  [PG ID 0 PG GUID 0(default_pg) Rank 0] Process group watchdog thread terminated with exception: {said}
CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be incorrect.
frame #0: c10::Error::Error(c10::SourceLocation, std::string) + 0x96 (0x79ebd4f6c446 in ...)

Fatal Python error: Aborted

Thread 0x000079e69b400640 (most recent call first):
"""


@pytest.mark.parametrize(
    ("said", "cause", "repeats"),
    [
        ("CUDA error: uncorrectable ECC error encountered", "memory of this GPU is damaged", False),
        ("CUDA error: an illegal memory access was encountered", "a kernel went wrong", False),
        ("CUDA error: device-side assert triggered", "points at something that is not there", True),
        (
            "[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=4, OpType=BROADCAST, NumelIn=112, "
            "NumelOut=112, Timeout(ms)=1800000) ran for 1800011 milliseconds before timing out.",
            "gave up waiting for another process",
            False,
        ),
    ],
)
def test_what_nccls_watchdog_aborted_the_process_for_is_told_first(said, cause, repeats):
    frames = "".join(f'  File "x.py", line {n} in f\n' for n in range(40))
    ended = exit_status(-6, f"{_ABORTED.format(said=said)}{frames}".encode())
    first, thrown, *_ = ended.words.splitlines()
    assert first.startswith("killed by SIGABRT: ") and cause in first
    assert said[:60] in thrown
    assert ended.reason == "device" and ended.repeats is repeats


def test_a_library_that_exits_is_heard_too_and_one_that_is_killed_says_nothing():
    words = (
        b"CUDA error (/src/hopper/flash_fwd_launch_template.h:188): an illegal memory access was encountered"
    )
    assert exit_status(1, words).reason == "device" and "a kernel went wrong" in exit_status(1, words).words
    assert exit_status(-9, words).reason == "signal"


def test_what_the_system_counts_is_read_where_it_says_it(tmp_path):
    vmstat = tmp_path / "vmstat"
    assert count_oom_kills(vmstat) is None
    vmstat.write_text("nr_free_pages 5\noom_kill 12\nother 3\n")
    assert count_oom_kills(vmstat) == 12
    vmstat.write_text("nr_free_pages 5\n")
    assert count_oom_kills(vmstat) is None


def test_the_stack_that_was_asked_for_last_is_read_once_it_is_written():
    assert written_stack(b"a library's words\n") == []
    asked = b"words\nStack (most recent call first):\n"
    assert written_stack(asked) == [] and written_stack(asked + b'  File "a.py", li') == []
    frames = [f'  File "{name}.py", line 1 in wait' for name in "abcdefghij"]
    stack = asked + "\n".join(frames).encode() + b"\n"
    assert written_stack(stack) == frames[:8] == written_stack(asked + b"  File old\n" + stack)
