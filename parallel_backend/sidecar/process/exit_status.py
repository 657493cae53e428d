"""The end of a rank's process in words: its exit code or signal, whether host memory ran out, its last lines."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from pathlib import Path

from ...host_memory import host_memory
from ...wire.device_faults import known_fault

BUS_ERROR = "killed by SIGBUS"  # the end of a process that reads past the end of a mapped file
_LINES = 12  # of a rank's output in an error message
_FRAMES = 8  # stack frames shown of a process that hangs
_THROWN = "what():"  # the C++ runtime writes it before it aborts


@dataclass(frozen=True)
class ExitStatus:
    """The end of a process. `words`: for users; `reason`: one of errors.FAILURES; `repeats`: a restart fails again."""

    words: str
    reason: str
    repeats: bool = False


def describe_exit(code: int | None, output: bytes, *, oom_kills: int | None, peak_bytes: int) -> ExitStatus:
    """Describes the end of a process. `code`: its exit code, negative for a signal, None if unknown; `oom_kills`: how
    many processes of this machine the system has killed for lack of memory since this one began, None if unknown;
    `peak_bytes`: the most host memory that it held."""
    # The system kills the largest process. If it killed one while this rank lived, a small rank need not be that one.
    out_of_memory = code == -signal.SIGKILL and bool(oom_kills) and peak_bytes > host_memory() / 10
    if out_of_memory:
        words = (
            f"killed by SIGKILL: host memory ran out, and the system ended this process, which held up to "
            f"{_gib(peak_bytes)} of the {_gib(host_memory())} there are. Use fewer processes or a smaller "
            f"weight_dtype, close other programs, or give the container more memory"
        )
    elif code is None:
        words = (
            "ended; something else in ComfyUI's process collected its exit code (a custom node, most likely)"
        )
    elif code < 0:
        words = f"killed by {_signal_name(-code)}"
        if code == -signal.SIGKILL and oom_kills is None:
            words += " (the system does this when memory runs out)"
    else:
        words = f"exited with code {code}"
    tail = "\n".join(line[:500] for line in _last_words(output))
    reason = "out_of_memory" if out_of_memory else "signal" if code is not None and code < 0 else "exit"
    repeats = out_of_memory
    # NCCL's watchdog aborts the process when its device fails, often before the rank could report that; other libraries
    # exit. A killed process reports nothing.
    speaks = code is not None and (code > 0 or code == -signal.SIGABRT)
    if speaks and (fault := known_fault(output.decode(errors="replace"))) is not None:
        words, reason, repeats = f"{words}: {fault.words}", "device", fault.repeats
    return ExitStatus(f"{words}\n{tail}" if tail else words, reason, repeats)


def _last_words(output: bytes) -> list[str]:
    """Returns the most useful lines: an uncaught C++ exception and the innermost frames of a crash (faulthandler prints
    them first), else the last lines."""
    lines = [line for line in output.decode(errors="replace").splitlines() if line.strip()]
    crashes = [i for i, line in enumerate(lines) if line.startswith("Fatal Python error")]
    if not crashes:
        return lines[-_LINES:]
    thrown = [line.strip() for line in lines[: crashes[-1]] if line.lstrip().startswith(_THROWN)][-1:]
    return [*thrown, *lines[crashes[-1] :]][:_LINES]


def written_stack(output: bytes) -> list[str]:
    """Returns the innermost Python frames of the latest stack that faulthandler wrote to `output`; empty until it has
    written one."""
    _, asked, frames = output.rpartition(b"Stack (most recent call first):\n")
    if not asked or not frames.endswith(b"\n"):
        return []
    return frames.decode(errors="replace").splitlines()[:_FRAMES]


def count_oom_kills(vmstat: Path = Path("/proc/vmstat")) -> int | None:
    """Returns how many processes, also in control groups, the system killed for memory since boot; None if unknown."""
    try:
        for line in vmstat.read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    except (OSError, ValueError):
        pass
    return None


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _gib(count: int) -> str:
    return f"{count / 2**30:.1f} GiB"
