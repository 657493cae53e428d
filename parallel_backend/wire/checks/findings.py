"""Subject and findings of the checks of the doctor and its GPU check, and outcomes of self-tests, whichever process ran
them."""

from __future__ import annotations

from dataclasses import dataclass

from ...errors import RequestError
from ...requests import TOKEN_MODES

# slow: works, but slower than possible or at its limit; skipped: could not be checked, and the finding says why.
STATUSES = ("ok", "slow", "broken", "skipped")
NO_GPU = "no GPU"


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


@dataclass(frozen=True)
class CheckSubject:
    """The subject of the GPU check. `devices`: one per rank; `model`: path of its file; `is_demo`: True if that is the
    pack's demo model; `pixels`: side of the square picture; `odd_pixels`: height and width of one whose latent has odd
    sides; `text`: tokens of a prompt; `steps`: of a job; `attention_tokens`: tokens for checks of attention alone."""

    devices: tuple[str, ...]
    model: str
    is_demo: bool
    pixels: int
    odd_pixels: tuple[int, int]
    text: int
    steps: int
    attention_tokens: int


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
