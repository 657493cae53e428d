"""Findings of checks, as the doctor and its GPU check report them, and outcomes of self-tests, whichever process ran
them."""

from __future__ import annotations

import traceback
from dataclasses import dataclass

from ...errors import ParallelError, RequestError
from ...requests import TOKEN_MODES

# slow: works, but slower than possible or at its limit; skipped: could not be checked, and the finding says why.
STATUSES = ("ok", "slow", "broken", "skipped")
NO_GPU = "no GPU"
_FRAMES = 8  # last lines of a traceback to show


@dataclass(frozen=True)
class Finding:
    """One line of a report. `status`: one of STATUSES; `remedy`: what to do, in words; `details`: lines of a table
    below it; `group`: its heading, which the report adds."""

    name: str
    status: str
    finding: str
    remedy: str = ""
    details: tuple[str, ...] = ()
    group: str = ""

    def __post_init__(self) -> None:
        assert self.status in STATUSES, self.status


def failed(error: BaseException) -> Finding:
    """Returns a finding for the error that ended a check, with its message and the end of its traceback."""
    words = str(error).strip() if isinstance(error, ParallelError) else f"{type(error).__name__}: {error}"
    lines = [line for line in "".join(traceback.format_exception(error)).splitlines() if line.strip()]
    return Finding("error", "broken", words[:600], details=tuple(line[:300] for line in lines[-_FRAMES:]))


@dataclass(frozen=True)
class SelfTest:
    """The outcome of a self-test. `mode`: the widest of requests.TOKEN_MODES that passed; `worst`: the largest relative
    difference of the runs that decided this, 0 if there are no numbers; `error`: why there are none."""

    class_name: str
    mode: str
    worst: float
    error: str = ""

    def __post_init__(self) -> None:
        if self.mode not in TOKEN_MODES:
            raise RequestError(f"tokens {self.mode!r} is unknown; choose one of {', '.join(TOKEN_MODES)}.")
