"""How a process ended, in words."""

import pytest

from parallel_backend.sidecar.exit_status import count_oom_kills, describe_exit


def exit_status(code, output=b"", oom_kills=0, peak_bytes=3 * 2**30):
    return describe_exit(code, output, oom_kills=oom_kills, peak_bytes=peak_bytes)


@pytest.fixture(autouse=True)
def memory_of_this_host(monkeypatch):
    monkeypatch.setattr("parallel_backend.sidecar.exit_status.host_memory", lambda: 8 * 2**30)


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
    assert (
        killed.out_of_memory
        and "host memory ran out" in killed.words
        and "3.0 GiB of the 8.0 GiB" in killed.words
    )
    assert not exit_status(-9, oom_kills=1, peak_bytes=2**28).out_of_memory  # another process was its victim
    assert not exit_status(-11, oom_kills=1).out_of_memory
    silent = exit_status(-9, oom_kills=None)
    assert not silent.out_of_memory and "the system does this when memory runs out" in silent.words


def test_the_last_lines_are_shown_and_of_a_crash_the_innermost_frames():
    lines = b"\n".join(b"line %d" % i for i in range(100))
    assert exit_status(1, lines).words.splitlines() == [
        "exited with code 1",
        *(f"line {i}" for i in range(88, 100)),
    ]
    crash = lines + b"\nFatal Python error: Segmentation fault\n\n" + lines
    assert exit_status(-11, crash).words.splitlines()[1:3] == [
        "Fatal Python error: Segmentation fault",
        "line 0",
    ]


def test_what_the_system_counts_is_read_where_it_says_it(tmp_path):
    vmstat = tmp_path / "vmstat"
    assert count_oom_kills(vmstat) is None
    vmstat.write_text("nr_free_pages 5\noom_kill 12\nother 3\n")
    assert count_oom_kills(vmstat) == 12
    vmstat.write_text("nr_free_pages 5\n")
    assert count_oom_kills(vmstat) is None
